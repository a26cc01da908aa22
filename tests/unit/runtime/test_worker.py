"""Jobs run in order, errors surface once, and waiting ends."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from shardwise.errors import BudgetError
from shardwise.runtime.worker import Executor, LaggedExecutor, ThreadExecutor

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(kw_only=True)
class Job:
    """Does something, and notes what became of it."""

    run: Callable[[], object] = lambda: None
    fates: list[str] = field(default_factory=list)

    def __call__(self) -> None:
        self.fates.append("run")
        self.run()

    def abandon(self) -> None:
        self.fates.append("abandoned")

    def receive(self) -> None:
        self.fates.append("received")


def run_all(executor: Executor, jobs: list[Job]) -> None:
    for job in jobs:
        executor.submit(job)
    executor.drain()


@pytest.mark.parametrize("make", [LaggedExecutor, ThreadExecutor])
def test_jobs_run_in_order_and_drain_waits_for_all(make) -> None:
    executor, seen = make(), []

    def job(number: int) -> None:
        time.sleep(0.001 * (5 - number))
        seen.append(number)

    for number in range(5):
        executor.submit(Job(run=lambda number=number: job(number)))
    executor.drain()
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make", [LaggedExecutor, ThreadExecutor])
def test_an_error_is_raised_by_drain_and_not_again(make) -> None:
    executor, seen = make(), []

    def fail() -> None:
        raise ValueError("peer gone")

    executor.submit(Job(run=fail))
    with pytest.raises(ValueError, match="peer gone"):
        executor.drain()
    executor.submit(Job(run=lambda: seen.append(1)))
    executor.drain()
    assert seen == [1]


def test_the_thread_keeps_no_finished_job_alive() -> None:
    class Buffer:
        pass

    executor, buffer = ThreadExecutor(), Buffer()
    alive = weakref.ref(buffer)
    executor.submit(Job(run=lambda kept=buffer: None))
    del buffer
    executor.drain()
    assert alive() is None


def test_the_submitting_thread_is_never_blocked() -> None:
    executor, release = ThreadExecutor(), threading.Event()
    executor.submit(Job(run=lambda: release.wait(5)))
    executor.submit(Job())  # returns although the first still runs
    release.set()
    executor.drain()


@pytest.mark.parametrize("make", [LaggedExecutor, ThreadExecutor])
def test_jobs_after_a_failed_one_are_abandoned_not_dropped(make) -> None:
    """Peers know nothing of what failed here: they send, and wait for answers."""

    def fail() -> None:
        raise BudgetError("the disk is full")

    executor, later = make(), [Job(), Job()]
    with pytest.raises(BudgetError):
        run_all(executor, [Job(run=fail), *later])
    assert [job.fates for job in later] == [["abandoned"], ["abandoned"]]


@pytest.mark.parametrize("make", [LaggedExecutor, ThreadExecutor])
def test_jobs_after_a_broken_connection_are_dropped(make) -> None:
    """Each would wait as long as the first."""

    def fail() -> None:
        raise RuntimeError("Timed out")

    executor, later = make(), [Job(), Job()]
    with pytest.raises(RuntimeError):
        run_all(executor, [Job(run=fail), *later])
    assert [job.fates for job in later] == [[], []]


def test_a_closed_executor_receives_what_it_has() -> None:
    executor, job, closed = LaggedExecutor(), Job(), []
    executor.submit(job)
    executor.close(lambda: closed.append(list(job.fates)))
    assert closed == [["received"]]


def test_a_closed_thread_abandons_what_it_has_and_then_says_so() -> None:
    executor, release, over = ThreadExecutor(), threading.Event(), threading.Event()
    first, second, closed = Job(run=lambda: release.wait(5)), Job(), []

    def close() -> None:
        closed.append([list(first.fates), list(second.fates)])
        over.set()

    executor.submit(first)
    executor.submit(second)
    while not first.fates:
        time.sleep(0.001)
    executor.close(close)
    assert not closed
    third = Job()
    executor.submit(third)  # a new thread, which does not wait for the old one
    while not third.fates:
        time.sleep(0.001)
    release.set()
    assert over.wait(5)
    assert closed == [[["run"], ["abandoned"]]]
    assert third.fates == ["run"]
    executor.drain()


def test_an_idle_thread_is_closed_at_once() -> None:
    executor, closed = ThreadExecutor(), []
    executor.submit(Job())
    executor.drain()
    executor.close(lambda: closed.append(1))
    assert closed == [1]
