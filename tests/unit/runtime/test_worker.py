"""Jobs run in order, errors surface once, and waiting ends."""

from __future__ import annotations

import threading
import time

import pytest

from shardwise.runtime.worker import LaggedExecutor, ThreadExecutor


@pytest.mark.parametrize("make", [LaggedExecutor, ThreadExecutor])
def test_jobs_run_in_order_and_drain_waits_for_all(make) -> None:
    executor, seen = make(), []

    def job(number: int) -> None:
        time.sleep(0.001 * (5 - number))
        seen.append(number)

    for number in range(5):
        executor.submit(lambda number=number: job(number))
    executor.drain()
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make", [LaggedExecutor, ThreadExecutor])
def test_an_error_is_raised_by_drain_and_not_again(make) -> None:
    executor, seen = make(), []

    def fail() -> None:
        raise ValueError("peer gone")

    executor.submit(fail)
    with pytest.raises(ValueError, match="peer gone"):
        executor.drain()
    executor.submit(lambda: seen.append(1))
    executor.drain()
    assert seen == [1]


def test_the_thread_keeps_no_finished_job_alive() -> None:
    import weakref

    class Buffer:
        pass

    executor, buffer = ThreadExecutor(), Buffer()
    alive = weakref.ref(buffer)
    executor.submit(lambda kept=buffer: None)
    del buffer
    executor.drain()
    assert alive() is None


def test_the_submitting_thread_is_never_blocked() -> None:
    executor, release = ThreadExecutor(), threading.Event()
    executor.submit(lambda: release.wait(5) and None)
    executor.submit(lambda: None)  # returns although the first still runs
    release.set()
    executor.drain()
