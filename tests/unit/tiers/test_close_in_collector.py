"""Closing tiers must be possible for the garbage collector, wherever it happens to run."""

from __future__ import annotations

import threading

import pytest
import torch

from shardwise.tiers import open_tiers


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
