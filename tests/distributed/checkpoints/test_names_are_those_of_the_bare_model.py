"""Wrapping changes no name, of the model or of the optimizer, in whatever order it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw
from shardwise.checkpoint.index import read_index

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _bare() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def _inside(model: nn.Module) -> nn.Module:
    model[1][0] = checkpoint_wrapper(model[1][0])
    return sw.shard(model, stage=3)


def _around(model: nn.Module) -> nn.Module:
    model[1] = checkpoint_wrapper(model[1])
    return sw.shard(model, stage=3)


def _afterwards(model: nn.Module) -> nn.Module:
    sw.shard(model, stage=3)
    model[1] = checkpoint_wrapper(model[1])
    return model


def _compiled(model: nn.Module) -> Any:
    return torch.compile(sw.shard(model, stage=2), backend="eager")


_WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "inside": _inside,
    "around": _around,
    "afterwards": _afterwards,
    "compiled": _compiled,
}


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("wrapper", _WRAPPERS)
def test_names_are_those_of_the_bare_model(wrapper: str, tmp_path: Path) -> None:
    names, loaded = {}, {}
    for name, wrap in (("bare", lambda m: sw.shard(m, stage=2)), (wrapper, _WRAPPERS[wrapper])):
        model = wrap(_bare())
        optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters()))
        eager = getattr(model, "_orig_mod", model)  # warnings of the compiler would be errors
        optimizer.backward(eager(torch.ones(1, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
        sw.save(tmp_path / name, model, optimizer)
        names[name] = read_index(tmp_path / name).names
        plain = _bare()
        its_optimizer = torch.optim.AdamW(plain.parameters())
        sw.load(tmp_path / name, plain, its_optimizer)
        loaded[name] = [*plain.parameters(), *(s["exp_avg"] for s in its_optimizer.state.values())]
    assert names[wrapper] == names["bare"]
    for actual, expected in zip(loaded[wrapper], loaded["bare"], strict=True):
        assert torch.equal(actual, expected)
