"""Closing tiers must be possible for the garbage collector, wherever it happens to run."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from shardwise.tiers import open_tiers

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_close_takes_no_lock_of_starting_threads() -> None:
    """A thread that starts holds such a lock while it allocates, so the collector may run there."""
    lock = vars(threading).get("_shutdown_locks_lock")
    if lock is None:
        pytest.skip("this Python starts threads without such a lock")
    tiers = open_tiers(torch.device("cpu"))
    source, target = (tiers.host.allocate(4, torch.float32) for _ in range(2))
    source.tensor.zero_()
    tiers.copy(source, target).wait()
    closing, is_closed = threading.Event(), threading.Event()

    def close() -> None:
        closing.wait()
        tiers.close()
        is_closed.set()

    threading.Thread(target=close, daemon=True).start()
    with lock:
        closing.set()
        assert is_closed.wait(timeout=10)


class Owner:
    """Is garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


class Collecting(threading.Condition):
    """Lets the collector run where a thread that copies is about to say that it has."""

    def __enter__(self) -> bool:
        if threading.current_thread().name.startswith("shardwise-memory-copies"):
            gc.collect()
        return super().__enter__()


@pytest.mark.parametrize("moment", ["amid the copy", "behind it"])
def test_a_thread_that_copies_does_not_wait_for_itself(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiers go while one of their copies runs, and the collector happens to run on its thread."""
    tiers = open_tiers(torch.device("cpu"))
    source, target = (tiers.host.allocate(4, torch.float32) for _ in range(2))
    source.tensor.zero_()
    owner, is_garbage = Owner(), threading.Event()
    finalizer = weakref.finalize(owner, tiers.close)
    real = type(tiers.host).open_pieces

    @contextmanager
    def open_pieces(*arguments) -> Iterator[object]:
        is_garbage.wait(10)
        if moment == "amid the copy":
            gc.collect()
        with real(*arguments) as pieces:
            yield pieces

    monkeypatch.setattr(type(tiers.host), "open_pieces", open_pieces)
    if moment == "behind it":
        monkeypatch.setattr(tiers._copier._scheduler, "_changed", Collecting())
    transfer = tiers.copy(source, target)
    gc.disable()
    try:
        del owner
        is_garbage.set()
        has_run = threading.Event()
        threading.Thread(target=lambda: (transfer.wait(), has_run.set()), daemon=True).start()
        assert has_run.wait(10)
    finally:
        gc.enable()
    for _ in range(1000):  # the thread ends the tiers after it has told of its copy
        if tiers.host.allocated_bytes == 0:
            break
        threading.Event().wait(0.01)
    assert tiers.host.allocated_bytes == 0
    assert not finalizer.alive
