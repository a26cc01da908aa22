"""`no_sync` is legal at every stage and gives the gradients of one reduction over local sums."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import (
    FACES,
    STAGES,
    Face,
    Pair,
    Setting,
    full_gradients,
    parameters,
    stages_of,
)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, 3, timeout_s=20)
@pytest.mark.parametrize("forward_outside", [False, True], ids=["whole", "backward-only"])
@pytest.mark.parametrize("face", FACES)
def test_no_sync_changes_no_numbers(face: Face, forward_outside: bool) -> None:
    for stage in stages_of(face):
        pair = Pair(_model, setting=Setting(stage=stage, face=face))
        for _ in range(2):
            for micro_batch in range(3):
                pair.backward(
                    _loss,
                    synchronised=micro_batch == 2,
                    forward_outside=forward_outside,
                    bare=micro_batch == 1,
                )
            pair.check_gradients()
            pair.step()
            pair.check()


@pytest.mark.world_size(2, timeout_s=20)
def test_passes_before_inside_and_after_no_sync_all_count() -> None:
    """Reduced, then local, then reduced again; and gradients that only `step` reduces."""
    for stage in STAGES:
        pair = Pair(_model, setting=Setting(stage=stage))
        for synchronised in (True, False, True):
            pair.backward(_loss, synchronised=synchronised)
        pair.check_gradients()
        pair.step()
        pair.check()

        model = sw.shard(_model(), stage=stage)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        before = parameters(model)
        with sw.no_sync(model), sw.no_sync(model):
            model(torch.ones(1, 5)).sum().backward()
        plain = _model()
        plain.load_state_dict(before)
        plain(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        assert_bit_equal(parameters(model), parameters(plain))


@pytest.mark.world_size(2, timeout_s=20)
def test_a_step_inside_no_sync_is_refused_and_costs_nothing() -> None:
    model = sw.shard(_model(), stage=2)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    with optimizer.no_sync():
        optimizer.backward(_loss(model, dist.get_rank()))
        with pytest.raises(sw.ShardwiseError, match="no_sync"):
            optimizer.step()
    optimizer.backward(_loss(model, dist.get_rank()))
    assert all(g is not None for g in full_gradients(model).values())
    optimizer.step()
