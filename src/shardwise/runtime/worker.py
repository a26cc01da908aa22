"""Finish started reductions beside the backward pass, in the order they were started.

A pairwise reduction ends with host work (wait, add, free the buffer). A thread does it, so that
backward never blocks on a slower rank and buffers are returned as early as they can be. Native
collectives need no thread: their waits only order streams, so they are finished a little late.

What has been started must be received even where nobody wants it any more: gloo reads a connection
no more once a message comes for memory that is gone, and peers may wait for an answer.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from collections.abc import Callable


class Job(Protocol):
    """The end of a communication that was started."""

    def __call__(self) -> None:
        """Communicate, and keep the result."""
        ...

    def abandon(self) -> None:
        """Communicate, since peers go on, and throw the result away."""
        ...

    def receive(self) -> None:
        """Wait for what has been started, and start nothing more."""
        ...


class Executor(Protocol):
    """Runs jobs in order of submission.

    After an error, later jobs are abandoned until ``drain`` has raised it; dropped, where it was
    the communication that failed.
    """

    def submit(self, job: Job) -> None:
        """Take a job; it runs now or later, never before an earlier one."""
        ...

    def drain(self) -> None:
        """Return when every job has run; raise the first error of any of them."""
        ...

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Let go of what waits for jobs; a later job takes it up again.

        What a failed pass has left is received. ``then`` is called when nothing runs any more, at
        once or on another thread: nobody waits for a thread here, since the collector may call.
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
        self._run_down_to(self._lag)

    def drain(self) -> None:
        """Run everything that is left."""
        self._run_down_to(0)

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Receive what is left."""
        with suppress(RuntimeError):  # of a peer that is gone: nothing is to come from it
            while self._pending:
                self._pending.popleft().receive()
        self._pending.clear()
        if then is not None:
            then()

    def _run_down_to(self, num_pending: int) -> None:
        """Run the oldest jobs until so many are left; after an error none is."""
        try:
            while len(self._pending) > num_pending:
                self._pending.popleft()()
        except BaseException as error:
            with suppress(RuntimeError):  # the first error is the one to know of
                while self._pending and not _is_of_communication(error):
                    self._pending.popleft().abandon()
            self._pending.clear()
            raise


class ThreadExecutor:
    """Run jobs on one daemon thread.

    A daemon, because a rank that fails must be able to exit while the thread still waits for a
    peer.
    """

    def __init__(self) -> None:
        """Start no thread yet: a process may fork before its first job."""
        self._jobs: SimpleQueue[Job | _Last] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._idle = threading.Condition()
        self._num_pending = 0

    def submit(self, job: Job) -> None:
        """Hand the job to the thread."""
        if self._thread is None:
            self._jobs = SimpleQueue()
            self._thread = threading.Thread(
                target=_run_forever,
                args=(self, self._jobs),
                name="shardwise-reductions",
                daemon=True,
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

    def close(self, then: Callable[[], None] | None = None) -> None:
        """End the thread after the jobs that it has."""
        is_idle = self._num_pending == 0
        if then is not None and is_idle:
            then()
        if self._thread is not None:
            self._jobs.put(_Last(None if is_idle else then))
            self._thread = None

    def run_next(self, jobs: SimpleQueue[Job | _Last]) -> bool:
        """Run one job on the calling thread, keeping its error for ``drain``; False if closed."""
        job = jobs.get()
        if isinstance(job, _Last):
            if job.then is not None:
                job.then()
            return False
        try:
            is_closed = self._thread is None or self._jobs is not jobs
            if self._error is None and not is_closed:
                job()
            elif self._error is None or not _is_of_communication(self._error):
                job.abandon()
        except BaseException as error:
            self._error = self._error or error
        finally:
            del job  # a job holds its buffer
            with self._idle:
                self._num_pending -= 1
                self._idle.notify_all()
        return True


class _Last:
    """Ends the thread."""

    def __init__(self, then: Callable[[], None] | None) -> None:
        """Call ``then`` at the end."""
        self.then = then


def _run_forever(executor: ThreadExecutor, jobs: SimpleQueue[Job | _Last]) -> None:
    """Serve one executor until it is closed."""
    while executor.run_next(jobs):
        pass


def _is_of_communication(error: BaseException) -> bool:
    """Return whether waiting for the same peers again would fail, or take as long, once more."""
    return isinstance(error, RuntimeError) and not isinstance(error, ShardwiseError)
