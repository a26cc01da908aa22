"""What schedulers keep in the groups (`initial_lr`) and the rates themselves survive loading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import FACES, Face, parameters, stages_of


def _decay(epoch: int) -> float:
    return 0.5**epoch


def _make(face: Face, stage: int, lr: float) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inner = torch.optim.AdamW(model.parameters(), lr=lr)
    if face == "module":
        return sw.shard(model, stage=stage), sw.ShardedOptimizer(inner)
    return model, sw.ShardedOptimizer(inner, stage=stage)


def _train(model: nn.Module, optimizer: Any, scheduler: Any, num_epochs: int) -> list[float]:
    rates = []
    for _ in range(num_epochs):
        optimizer.backward(_loss(model))
        optimizer.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_schedules_resume_where_they_stopped(face: Face) -> None:
    for stage in stages_of(face):
        model, optimizer = _make(face, stage, 0.01)
        scheduler = LambdaLR(optimizer, _decay)
        _train(model, optimizer, scheduler, 3)
        saved, weights = optimizer.state_dict(), parameters(model)
        assert saved["param_groups"][0]["initial_lr"] == 0.01
        uninterrupted = _train(model, optimizer, scheduler, 3)

        new_model, new = _make(face, stage, 0.1)
        new_model.load_state_dict(weights)
        new.load_state_dict(saved)
        assert new.param_groups[0]["lr"] == 0.01 * 0.5**3
        resumed = LambdaLR(new, _decay, last_epoch=2)
        assert _train(new_model, new, resumed, 3) == uninterrupted
        assert_bit_equal(parameters(new_model), parameters(model))
