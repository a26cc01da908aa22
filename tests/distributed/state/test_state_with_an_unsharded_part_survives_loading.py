"""A layer left out of sharding is updated, saved, loaded and updated again with the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, assert_same_state, parameters


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))


def _sharded(stage: int, lr: float) -> tuple[nn.Module, Any]:
    model = _model()
    sw.shard(model, stage=stage, ignored=model[1].parameters())
    return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=lr))


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 5)).square().mean()


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_state_with_an_unsharded_part_survives_loading() -> None:
    """The same data on all ranks, since nobody reduces the gradients of the ignored layer."""
    plain = _model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    _steps(plain, plain_optimizer)
    halfway = copy.deepcopy(plain_optimizer.state_dict())
    _steps(plain, plain_optimizer)
    for stage in STAGES:
        model, optimizer = _sharded(stage, 0.1)
        _steps(model, optimizer)
        saved = optimizer.state_dict()
        assert_same_state(saved, halfway)
        new_model, new = _sharded(stage, 0.7)
        new_model.load_state_dict(model.state_dict())
        new.load_state_dict(saved)
        _steps(new_model, new)
        assert_bit_equal(parameters(new_model), parameters(plain))
        assert_same_state(new.state_dict(), plain_optimizer.state_dict())
