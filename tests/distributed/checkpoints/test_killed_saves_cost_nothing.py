"""Kill a save at every call on a file: the checkpoint before it loads, or the new one does."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.kit.faults import die, die_half_way, watched

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _model(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return sw.shard(model, stage=2)


def _value_in(path: Path) -> float:
    model = _model(0.0)
    sw.load(path, model)
    values = {value for p in model.parameters() for value in p.flatten().tolist()}
    assert len(values) == 1, values
    return values.pop()


def _run_and_die(action: Callable[[], None]) -> bool:
    """Run an action in a copy of this process; return whether it lived."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)


_SETTINGS: dict[str, dict[str, Any]] = {
    "new": {"name": "b", "keep_last": None, "has_exchange": True},
    "retention": {"name": "b", "keep_last": 1, "has_exchange": True},
    "replace": {"name": "a", "keep_last": None, "has_exchange": True},
    "replace-without-exchange": {"name": "a", "keep_last": None, "has_exchange": False},
}
_MOMENTS = ("before", "half-way", "after")


@pytest.mark.world_size(1, timeout_s=100)
@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("setting", _SETTINGS)
def test_every_kill_leaves_a_good_checkpoint(setting: str, moment: str, tmp_path: Path) -> None:
    options = _SETTINGS[setting]
    num_kills, is_over = 0, False
    sw.save(tmp_path / "a", _model(1.0))
    new = _model(2.0)
    while not is_over:

        def save(last: int = num_kills) -> None:
            def act(number: int, name: str, arguments: tuple) -> None:
                if number == last and moment != "after":
                    if moment == "half-way":
                        die_half_way(name, arguments)
                    die()

            def after(number: int, name: str) -> None:
                if number == last and moment == "after":
                    die()

            with watched(act, after=after, has_exchange=options["has_exchange"]):
                sw.save(tmp_path / options["name"], new, keep_last=options["keep_last"])

        is_over = _run_and_die(save)
        num_kills += not is_over
        good = sw.latest(tmp_path)
        assert good is not None
        assert _value_in(good) in (1.0, 2.0)
        if setting == "replace" or (setting == "new" and good.name == "a"):
            assert _value_in(tmp_path / "a") in (1.0, 2.0)
        if not is_over:  # from the same start again: the next save clears up what is left
            sw.save(tmp_path / "a", _model(1.0))
    good = sw.latest(tmp_path)
    assert good == tmp_path / options["name"]
    assert _value_in(good) == 2.0
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())
    assert num_kills >= 20  # in each of twelve cells


@pytest.mark.world_size(1, timeout_s=100)
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """Whatever the writing threads are doing: one save after the other, until the process dies."""
    moments = random.Random(0)
    sw.save(tmp_path / "a", _model(1.0))
    for number in range(40):
        child = os.fork()
        if child == 0:
            value = 1.0
            while True:
                value += 1
                sw.save(tmp_path / f"step-{value % 3:.0f}", _model(value), keep_last=2)
        time.sleep(moments.uniform(0.01, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        good = sw.latest(tmp_path)
        assert good is not None, number
        _value_in(good)
    sw.save(tmp_path / "last", _model(0.5))
    assert sw.latest(tmp_path) == tmp_path / "last"
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())
