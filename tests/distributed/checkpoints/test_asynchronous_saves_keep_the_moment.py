"""What is saved beside training is the state at the call, and errors come back at the next one."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.runtime.managed import record_of
from tests.kit.checkpoints import Job, exact_values, train, whole_state
from tests.kit.faults import FAILURES, fail, watched
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import assert_same_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _start(stage: int, seed: int) -> tuple[nn.Module, Any]:
    started = Job(stage=stage).start(seed=seed)
    assert started is not None
    return started


class _Gate:
    """Holds back the first write of a save until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def act(self, number: int, name: str, arguments: tuple) -> None:
        if name == "write":
            assert self._open.wait(timeout=20)

    def open(self) -> None:
        self._open.set()


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_steps_taken_while_it_writes_are_not_in_it(stage: int, tmp_path: Path) -> None:
    model, optimizer = _start(stage, 1)
    train(model, optimizer, 2)
    expected = whole_state(model, optimizer)
    gate = _Gate()
    with watched(gate.act):
        pending = sw.save(tmp_path / "a", model, optimizer, extra={"step": 2}, async_=True)
        assert pending is not None
        train(model, optimizer, 3)
        assert not pending.is_done
        assert not (tmp_path / "a").exists()
        gate.open()
        pending.wait()
    dist.barrier()
    other, its_optimizer = _start(stage, 2)
    assert sw.load(tmp_path / "a", other, its_optimizer) == {"step": 2}
    actual = whole_state(other, its_optimizer)
    assert_bit_equal(actual["parameters"], expected["parameters"])
    assert_bit_equal(actual["buffers"], expected["buffers"])
    assert_same_state(actual["optimizer"], expected["optimizer"])


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_a_second_save_waits_or_is_refused_as_asked(tmp_path: Path) -> None:
    model, optimizer = _start(2, 1)
    gate = _Gate()
    with watched(gate.act):
        first = sw.save(tmp_path / "a", model, optimizer, async_=True)
        assert first is not None
        with pytest.raises(sw.CheckpointError, match="one that still writes"):
            sw.save(tmp_path / "b", model, optimizer, async_="refuse")
        gate.open()
        second = sw.save(tmp_path / "b", model, optimizer, async_="wait")
        assert second is not None
        assert first.is_done
        sw.save(tmp_path / "c", model, optimizer)
        assert second.is_done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.world_size(1, timeout_s=60)
@pytest.mark.parametrize("call", ["wait", "save", "load"])
def test_an_interrupted_wait_leaves_the_save_alone(call: str, tmp_path: Path) -> None:
    """Ctrl-C ends the wait for a save, which still writes what was copied for it."""
    model, optimizer = _start(2, 1)
    sw.save(tmp_path / "before", model, optimizer)
    gate = _Gate()
    with watched(gate.act):
        first = sw.save(tmp_path / "a", model, optimizer, async_=True)
        assert first is not None
        expected = exact_values(model, optimizer)
        calls: dict[str, Callable[[], object]] = {
            "wait": first.wait,
            "save": lambda: sw.save(tmp_path / "b", model, optimizer, async_=True),
            "load": lambda: sw.load(tmp_path / "before", model, optimizer),
        }
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            calls[call]()
        assert not first.is_done
        train(model, optimizer, 1)
        gate.open()
        last = sw.save(tmp_path / "c", model, optimizer, async_=True)
        assert last is not None
        last.wait()
    other, its_optimizer = _start(2, 2)
    sw.load(tmp_path / "a", other, its_optimizer)
    assert_bit_equal(exact_values(other, its_optimizer), expected)


@pytest.mark.world_size(1, 2, timeout_s=60)
@pytest.mark.parametrize("call", ["wait", "save", "load"])
def test_an_error_comes_back_at_the_next_call_on_all_ranks(call: str, tmp_path: Path) -> None:
    model, optimizer = _start(2, 1)
    sw.save(tmp_path / "a", model, optimizer)
    last = dist.get_world_size() - 1

    def act(number: int, name: str, arguments: tuple) -> None:
        if name == "write" and dist.get_rank() == last:
            fail(FAILURES["disk-full"])

    with watched(act):
        pending = sw.save(tmp_path / "b", model, optimizer, async_=True)
        assert pending is not None
        while not any(_everywhere(pending.is_done)):  # ranks must decide alike to train on
            train(model, optimizer, 1)
        calls = {
            "wait": pending.wait,
            "save": lambda: sw.save(tmp_path / "c", model, optimizer),
            "load": lambda: sw.load(tmp_path / "a", model, optimizer),
        }
        with pytest.raises(sw.CheckpointError, match="No space left"):
            calls[call]()
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.world_size(1, 2, timeout_s=60)
@pytest.mark.parametrize("who", ["everyone", "the first"])
def test_an_error_that_all_were_told_of_does_not_cost_the_next_save(who, tmp_path: Path) -> None:
    """To save elsewhere is what one does after a full disk."""
    model, optimizer = _start(2, 1)

    def act(number: int, name: str, arguments: tuple) -> None:
        if name == "write":
            fail(FAILURES["disk-full"])

    with watched(act):
        pending = sw.save(tmp_path / "a", model, optimizer, async_=True)
        assert pending is not None
        while not all(_everywhere(pending.is_done)):
            pass
    if who == "everyone" or dist.get_rank() == 0:
        with pytest.raises(sw.CheckpointError, match="No space left"):
            pending.wait()
    if who == "the first" and dist.get_world_size() > 1:  # the others still have to hear of it
        with pytest.raises(sw.CheckpointError, match="No space left"):
            sw.save(tmp_path / "b", model, optimizer)
    sw.save(tmp_path / "b", model, optimizer)
    assert sw.latest(tmp_path) == tmp_path / "b"


def _everywhere(value: bool) -> list[bool]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.world_size(2, timeout_s=60)
def test_staging_holds_what_this_rank_writes(tmp_path: Path) -> None:
    model = sw.shard(nn.Linear(100, 41, bias=False), stage=3)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    optimizer.backward(model(torch.randn(2, 100)).sum())
    optimizer.step()
    optimizer.zero_grad()
    pending = sw.save(tmp_path / "a", model, optimizer, async_=True)
    assert pending is not None
    piece = record_of(model.weight).piece
    step_bytes = 4 * (piece.parameter_start == 0)
    assert pending.staged_bytes == 3 * 4 * piece.numel + step_bytes
    pending.wait()
