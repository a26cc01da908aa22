"""`full_gradient` raises on all ranks, instead of leaving out local gradients that wait."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.pair import STAGES


def _refuse(model: nn.Module) -> None:
    with pytest.raises(sw.ShardwiseError, match="full_gradient expected a gradient that was"):
        sw.full_gradient(model.bias)


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_local_gradients_are_not_left_out(param_dtype: torch.dtype | None) -> None:
    for stage in STAGES:
        precision = sw.MixedPrecision(param_dtype=param_dtype, reduce_dtype=torch.float32)
        model = sw.shard(nn.Linear(4, 1), stage=stage, mixed_precision=precision)
        with sw.no_sync(model):
            model(torch.ones(1, 4)).sum().backward()
        _refuse(model)
        model(torch.ones(1, 4)).sum().backward()
        gradient = sw.full_gradient(model.bias)
        assert gradient is not None
        assert gradient.tolist() == [2.0]


@pytest.mark.world_size(2, timeout_s=20)
def test_an_assigned_gradient_of_one_rank_raises_on_all() -> None:
    for stage in STAGES:
        model = sw.shard(nn.Linear(4, 1), stage=stage)
        model(torch.ones(1, 4)).sum().backward()
        if dist.get_rank() == 1:
            model.bias.grad = torch.ones(1)
        _refuse(model)
