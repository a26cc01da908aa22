"""Schedulers made before or after wrapping drive the groups that are used, each by its own rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, parameters

if TYPE_CHECKING:
    from collections.abc import Callable

_SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: (step + 1) / 4),
    "one-cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=[2e-2, 1e-5], total_steps=8),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": model[0].parameters(), "lr": 2e-2},
        {"params": model[2].parameters(), "lr": 1e-5},
    ]
    return torch.optim.AdamW(groups)


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("kind", _SCHEDULERS)
def test_schedulers_act_on_every_group(kind: str) -> None:
    """The same data on all ranks: their mean is what each has."""
    for when in ("before", "on-inner", "on-wrapped"):
        for stage in STAGES:
            plain, model = _model(), _model()
            plain_optimizer, inner = _optimizer(plain), _optimizer(model)
            groups = list(inner.param_groups)
            plain_scheduler = _SCHEDULERS[kind](plain_optimizer)
            scheduler = _SCHEDULERS[kind](inner) if when == "before" else None
            sw.shard(model, stage=stage)
            optimizer = sw.ShardedOptimizer(inner)
            if scheduler is None:
                scheduler = _SCHEDULERS[kind](inner if when == "on-inner" else optimizer)
            for _ in range(4):
                for one, its_optimizer, its_scheduler in (
                    (plain, plain_optimizer, plain_scheduler),
                    (model, optimizer, scheduler),
                ):
                    _loss(one).backward()
                    its_optimizer.step()
                    its_optimizer.zero_grad()
                    its_scheduler.step(1.0) if kind == "plateau" else its_scheduler.step()
                rates = [group["lr"] for group in optimizer.param_groups]
                assert rates == [group["lr"] for group in plain_optimizer.param_groups]
                assert rates[0] / rates[1] == pytest.approx(2e3)
                assert_bit_equal(parameters(model), parameters(plain))
            assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
            optimizer.load_state_dict(optimizer.state_dict())
            assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
