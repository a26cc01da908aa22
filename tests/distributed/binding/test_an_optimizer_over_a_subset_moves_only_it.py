"""An optimizer made for a part of the model stays one for that part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, parameters, stages_of


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))


def _last(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[2].parameters(), lr=0.1, weight_decay=0.1)


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_an_optimizer_over_a_subset_moves_only_it(face: Face) -> None:
    """Ranks start alike here, as `ShardedOptimizer` alone shares only what it was given."""
    for stage in stages_of(face):
        pair = Pair(_model, _last, setting=Setting(stage=stage, face=face))
        before = parameters(pair.model)
        for _ in range(3):
            pair.backward(_loss)
            pair.step()
            pair.check()
        after = parameters(pair.model)
        still = [name for name in before if not name.startswith("2.")]
        assert_bit_equal({n: after[n] for n in still}, {n: before[n] for n in still})
        assert all((after[n] != before[n]).any() for n in before if n not in still)


@pytest.mark.world_size(2, timeout_s=20)
def test_two_optimizers_share_one_sharded_model() -> None:
    for stage in STAGES:
        torch.manual_seed(0)
        model, plain = _model(), _model()
        plain.load_state_dict(model.state_dict())
        sw.shard(model, stage=stage)
        mine = [
            sw.ShardedOptimizer(torch.optim.SGD(model[:2].parameters(), lr=0.1, momentum=0.9)),
            sw.ShardedOptimizer(_last(model)),
        ]
        theirs = [torch.optim.SGD(plain[:2].parameters(), lr=0.1, momentum=0.9), _last(plain)]
        for step in range(3):
            for one in (model, plain):
                torch.manual_seed(step)
                _loss(one, 0).backward()
            for optimizer in (*mine, *theirs):
                optimizer.step()
            for optimizer in (*mine, *theirs):
                optimizer.zero_grad()
            assert_bit_equal(parameters(model), parameters(plain))
