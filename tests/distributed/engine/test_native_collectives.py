"""The path for backends with in-place collectives, exercised on gloo, gives the same results."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from shardwise.runtime import collectives, reducer, reduction, topology
from tests.kit.models import CASES
from tests.kit.sharded import Setting, adamw, assert_like_one_process


@pytest.mark.world_size(1, 2, timeout_s=60)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_native_collectives_train_like_one_process(stage: int) -> None:
    def never(axis, device) -> bool:
        return False

    setting = Setting(stage=stage, num_micro_batches=2, options={"chunk_bytes": 20_000})
    with (
        mock.patch.object(collectives, "is_pairwise", never),
        mock.patch.object(reducer, "is_pairwise", never),
        mock.patch.object(topology, "is_pairwise", never),
        mock.patch.object(reduction, "is_pairwise", never),
    ):
        # two summands: any algorithm adds them alike
        assert_like_one_process(CASES["gpt"], adamw, setting)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_native_half_sum_is_divided_before_it_is_sent(dtype: torch.dtype) -> None:
    import torch.distributed as dist

    import shardwise as sw

    def never(axis, device) -> bool:
        return False

    with (
        mock.patch.object(collectives, "is_pairwise", never),
        mock.patch.object(reducer, "is_pairwise", never),
        mock.patch.object(topology, "is_pairwise", never),
        mock.patch.object(reduction, "is_pairwise", never),
    ):
        model = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
        unscaled = sw.MixedPrecision(loss_scale=sw.LossScale(initial_scale=1.0))
        optimizer = sw.ShardedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), stage=2, mixed_precision=unscaled
        )
        large = 40_000.0  # the sum of three is above the largest float16, their mean is not
        optimizer.backward((model.weight * large).float().sum())
        gradient = sw.full_gradient(model.weight)
    assert gradient is not None
    assert dist.get_world_size() == 3
    torch.testing.assert_close(gradient, torch.full((4, 4), large), rtol=1e-2, atol=0)
