"""Every option of every group comes back: numbers, flags, tuples, None, tensors, the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import shardwise as sw

if TYPE_CHECKING:
    from pathlib import Path


def _start(*, is_other: bool) -> tuple[nn.Module, sw.ShardedOptimizer]:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    sw.shard(model, stage=2)
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.01, "betas": (0.8, 0.9), "custom": (1, None)},
        {"params": [], "lr": 0.5, "custom": "empty"},
        {"params": model[1].parameters(), "lr": torch.tensor(0.25), "weight_decay": 0.5},
        {"params": model[2].parameters(), "eps": 1e-3, "amsgrad": True, "custom": {"a": [True]}},
    ]
    if is_other:
        groups = [{"params": list(group["params"]), "lr": 0.9} for group in groups]
    return model, sw.ShardedOptimizer(torch.optim.AdamW(groups, lr=0.1, foreach=False))


@pytest.mark.world_size(1, 2, 4, timeout_s=30)
def test_options_of_every_group_are_restored(tmp_path: Path) -> None:
    model, optimizer = _start(is_other=False)
    sw.save(tmp_path / "a", model, optimizer)
    other, its_optimizer = _start(is_other=True)
    sw.load(tmp_path / "a", other, its_optimizer)
    for actual, expected in zip(its_optimizer.param_groups, optimizer.param_groups, strict=True):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            if name != "params":
                assert type(actual[name]) is type(value), name
                assert actual[name] == value, name
