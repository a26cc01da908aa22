"""State of a plain optimizer loads into a sharded one and the other way, by place in the groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import (
    FACES,
    Face,
    Pair,
    Setting,
    assert_same_state,
    parameters,
    stages_of,
)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 3))


def _by_decay(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices first: not the order of the model, and two layers have equal shapes."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, 3, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_plain_optimizers_and_sharded_ones_exchange_state(face: Face) -> None:
    for stage in stages_of(face):
        setting = Setting(stage=stage, face=face)
        earlier = Pair(_model, _by_decay, setting=setting)
        earlier.train(_loss, num_steps=2)

        into_sharded = Pair(_model, _by_decay, setting=setting)
        into_sharded.both(lambda m, e=earlier: m.load_state_dict(parameters(e.plain)))
        into_sharded.optimizer.load_state_dict(earlier.plain_optimizer.state_dict())
        into_sharded.plain_optimizer.load_state_dict(earlier.optimizer.state_dict())
        into_sharded.check()
        into_sharded.train(_loss, num_steps=2)


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_state_that_an_optimizer_already_has_is_sharded(face: Face) -> None:
    """Two plain steps, then sharding in the middle of the run."""
    for stage in stages_of(face):
        torch.manual_seed(0)
        plain, model = _model(), _model()
        model.load_state_dict(plain.state_dict())
        plain_optimizer, inner = _by_decay(plain), _by_decay(model)
        pairs = ((plain, plain_optimizer), (model, inner))
        for _ in range(2):
            for one, its in pairs:
                _step(one, its)
        if face == "module":
            sw.shard(model, stage=stage)
        optimizer = sw.ShardedOptimizer(inner, stage=None if face == "module" else stage)
        for _ in range(2):
            _step(plain, plain_optimizer)
            _step(model, optimizer)
        assert_bit_equal(parameters(model), parameters(plain))
        assert_same_state(optimizer.state_dict(), plain_optimizer.state_dict())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train on the same data on every rank."""
    model(torch.linspace(-1, 1, 15).view(3, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_state_of_another_shape_is_refused_and_changes_nothing(face: Face) -> None:
    for stage in stages_of(face):
        pair = Pair(_model, _by_decay, setting=Setting(stage=stage, face=face))
        pair.train(_loss, num_steps=1)
        before = pair.optimizer.state_dict()
        bad = pair.plain_optimizer.state_dict()
        bad["state"][1] = {**bad["state"][1], "exp_avg": torch.zeros(4, 4)}
        bad["param_groups"][0] = {**bad["param_groups"][0], "lr": 7.0}
        with pytest.raises(sw.ConfigurationError, match="exp_avg"):
            pair.optimizer.load_state_dict(bad)
        assert_same_state(pair.optimizer.state_dict(), before)
        with pytest.raises(sw.ConfigurationError, match="param_groups"):
            pair.optimizer.load_state_dict({**before, "param_groups": before["param_groups"][:1]})
        pair.train(_loss, num_steps=1)
