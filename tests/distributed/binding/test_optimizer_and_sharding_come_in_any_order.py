"""An optimizer made before sharding updates; one that was never wrapped says so, never nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, parameters


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_optimizer_and_sharding_come_in_any_order() -> None:
    """The same data on all ranks: their mean is what each has."""
    plain = _model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(2):
        _loss(plain).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for stage in STAGES:
        for before in (True, False):
            model = _model()
            if before:
                inner = torch.optim.AdamW(model.parameters(), lr=0.1)
                sw.shard(model, stage=stage)
            else:
                sw.shard(model, stage=stage)
                inner = torch.optim.AdamW(model.parameters(), lr=0.1)
            optimizer = sw.ShardedOptimizer(inner)
            for _ in range(2):
                _loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_bit_equal(parameters(model), parameters(plain))


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_a_forgotten_wrapper_raises() -> None:
    """AdamW decays before it looks at a gradient, so only without decay is nothing changed."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for foreach in (True, False):
            for stage in STAGES:
                model = _model()
                forgotten = kind(model.parameters(), lr=0.1, foreach=foreach, weight_decay=0)
                sw.shard(model, stage=stage)
                before = parameters(model)
                _loss(model).backward()
                with pytest.raises(sw.ShardwiseError, match="ShardedOptimizer"):
                    forgotten.step()
                with pytest.raises(sw.ShardwiseError, match="clip_grad_norm_"):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                assert_bit_equal(parameters(model), before)
