"""Setting `p.grad = None` before a step keeps the parameter and its state as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, full_gradients, parameters, stages_of


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3, bias=False))


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


def _hold_two(model: nn.Module) -> None:
    model[0].weight.grad = None
    model[2].weight.grad = None


@pytest.mark.world_size(1, 2, 3, timeout_s=20)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("face", FACES)
def test_a_gradient_set_to_none_holds_its_parameter(face: Face, bare: bool) -> None:
    for stage in stages_of(face):
        pair = Pair(_model, _adam, setting=Setting(stage=stage, face=face))
        before = parameters(pair.model)
        for step in range(5):
            pair.backward(_loss, bare=bare)
            if step < 3:
                pair.both(_hold_two)
            pair.step()
            pair.check()
            if step == 2:
                held = ("0.weight", "2.weight")
                after = parameters(pair.model)
                assert_bit_equal({n: after[n] for n in held}, {n: before[n] for n in held})
                assert set(pair.optimizer.state_dict()["state"]) == {1, 2, 3}


@pytest.mark.world_size(2, timeout_s=20)
def test_a_gradient_dropped_between_micro_batches_starts_again() -> None:
    for stage in STAGES:
        pair = Pair(_model, _adam, setting=Setting(stage=stage))
        pair.backward(_loss)
        pair.both(_hold_two)
        pair.backward(_loss)
        pair.check_gradients()
        pair.step()
        pair.check()


@pytest.mark.world_size(2, timeout_s=20)
def test_a_gradient_dropped_on_one_rank_is_dropped_on_all() -> None:
    for stage in STAGES:
        model = sw.shard(_model(), stage=stage)
        optimizer = sw.ShardedOptimizer(_adam(model))
        before = parameters(model)
        optimizer.backward(_loss(model, 0))
        if torch.distributed.get_rank() == 1:
            _hold_two(model)
        optimizer.step()
        after = parameters(model)
        for name in before:
            is_held = name in ("0.weight", "2.weight")
            assert torch.equal(before[name], after[name]) == is_held, name
        assert full_gradients(model)["0.weight"] is None
