"""Finish started reductions beside the backward pass, in the order they were started.

A pairwise reduction ends with host work (wait, add, free the buffer). A thread does it, so that
backward never blocks on a slower rank and buffers are returned as early as they can be. Native
collectives need no thread: their waits only order streams, so they are finished a little late.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

Job = Callable[[], None]


class Executor(Protocol):
    """Runs jobs in order of submission."""

    def submit(self, job: Job) -> None:
        """Take a job; it runs now or later, never before an earlier one."""
        ...

    def drain(self) -> None:
        """Return when every job has run; raise the first error of any of them."""
        ...

    def close(self) -> None:
        """Let the jobs that there are run, and let go of what waits for more.

        A later job takes it up again.
        """
        ...


class LaggedExecutor:
    """Run each job on the calling thread once ``lag`` later ones were submitted."""

    def __init__(self, lag: int = 2) -> None:
        """Keep at most ``lag`` jobs pending."""
        self._lag = lag
        self._pending: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        """Queue the job and run those that are due."""
        self._pending.append(job)
        while len(self._pending) > self._lag:
            self._pending.popleft()()

    def drain(self) -> None:
        """Run everything that is left."""
        try:
            while self._pending:
                self._pending.popleft()()
        finally:
            self._pending.clear()

    def close(self) -> None:
        """Run what a failed pass has left: messages on their way must still be received."""
        with suppress(RuntimeError):  # of a peer that is gone
            self.drain()


class ThreadExecutor:
    """Run jobs on one daemon thread.

    A daemon, because a rank that fails must be able to exit while the thread still waits for a
    peer. After an error, later jobs are dropped until ``drain`` has raised it.
    """

    def __init__(self) -> None:
        """Start no thread yet: a process may fork before its first job."""
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._idle = threading.Condition()
        self._num_pending = 0

    def submit(self, job: Job) -> None:
        """Hand the job to the thread."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_forever, args=(self,), name="shardwise-reductions", daemon=True
            )
            self._thread.start()
        with self._idle:
            self._num_pending += 1
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait for the thread to run dry."""
        with self._idle:
            self._idle.wait_for(lambda: self._num_pending == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread after the jobs that it has."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def run_next(self) -> bool:
        """Run one job on the calling thread, keeping its error for ``drain``; False if closed."""
        job = self._jobs.get()
        if job is None:
            return False
        try:
            if self._error is None:
                job()
        except BaseException as error:
            self._error = error
        finally:
            del job  # a job holds its buffer
            with self._idle:
                self._num_pending -= 1
                self._idle.notify_all()
        return True


def _run_forever(executor: ThreadExecutor) -> None:
    """Serve one executor until it is closed."""
    while executor.run_next():
        pass
