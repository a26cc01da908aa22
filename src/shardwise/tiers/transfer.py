"""One copy from block to block: a handle that is waited for; it does not choose when it runs."""

from __future__ import annotations

import threading
import traceback
from typing import TYPE_CHECKING, Protocol

from shardwise.errors import ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.tiers.block import Arrival, Block
    from shardwise.tiers.tier import Lane


class Scheduler(Protocol):
    """Decides when, and on which thread, copies run."""

    def submit(self, transfer: Transfer, after: Sequence[Transfer]) -> None:
        """Take a copy; call its ``run`` once, now or later, after those of ``after``."""
        ...

    def finish(self, transfer: Transfer) -> None:
        """Return when the copy has run."""
        ...

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Run what is left, take nothing more, and call ``then``; idempotent.

        Where the calling thread is amid a copy - the collector may call - ``then`` is called by the
        thread that runs the last one.
        """
        ...


class Transfer:
    """A copy under way, made by ``Copier.copy``.

    Until ``wait`` has returned or raised, the target's contents are undefined, neither block may be
    written, and neither can be freed.
    """

    def __init__(
        self,
        source: Block,
        target: Block,
        *,
        job: Callable[[Sequence[Transfer]], Arrival | None],
        scheduler: Scheduler,
        lane: Lane | None,
    ) -> None:
        """Describe a copy that ``scheduler`` will run.

        Args:
            source: Read by the job.
            target: Written by the job.
            job: Moves the bytes, given the copies this one runs after; returns when a device will
                have done so, or None if it is done.
            scheduler: Who runs it.
            lane: Which threads are meant to; None for a job that only queues work on a device.
        """
        self.source = source
        self.target = target
        self.lane = lane
        self._job = job
        self._scheduler = scheduler
        self._needs: Transfer | None = None
        self._after: Sequence[Transfer] = ()
        self._has_run = threading.Event()
        self._error: BaseException | None = None
        self._arrival: Arrival | None = None

    def __repr__(self) -> str:
        return f"Transfer({self.source!r} -> {self.target!r})"

    @property
    def has_run(self) -> bool:
        """Whether the host is done with it; its error or its arrival is known then."""
        return self._has_run.is_set()

    @property
    def error(self) -> BaseException | None:
        """What ``wait`` will raise, once it has run."""
        return self._error

    @property
    def arrival(self) -> Arrival | None:
        """When a device has the bytes there; None if they are there once it has run."""
        return self._arrival

    def wait(self) -> None:
        """Make the target's bytes usable and both blocks free to be written or freed; idempotent.

        Work that is queued on the accelerator's *current stream* after this call sees the bytes. A
        target in host memory has them when this returns. The host does not wait for the bytes of
        an accelerator target: it may free the source (a tier reuses memory only when a device is
        done with it), but must call ``synchronize`` before it *writes* the source.

        Raises:
            Exception: The copy's error, at every call. The target's contents are undefined.
        """
        self.settle()
        if self._error is not None:
            raise self._error
        if self._arrival is not None:
            self._arrival.wait()

    def synchronize(self) -> None:
        """Wait until the bytes are there, also for the host; without a device this is ``wait``."""
        self.wait()
        if self._arrival is not None:
            self._arrival.synchronize()

    def settle(self) -> None:
        """Let it run out without raising its error; both blocks are no longer busy with it."""
        self._scheduler.finish(self)
        arrival = self._arrival
        if arrival is not None and self.target.tier.device.type == "cpu":
            arrival.synchronize()
            arrival = None
        self.source.finish(self, arrival)
        self.target.finish(self, arrival)

    def begin(self) -> list[Transfer]:
        """Claim both blocks; return the copies to run after.

        Raises:
            ShardwiseError: A block was freed; neither is claimed.
        """
        self._needs = self.source.writer
        before = self.source.start_read(self)
        try:
            before += self.target.start_write(self)
        except ShardwiseError:
            self.source.finish(self, None)
            raise
        self._after = tuple(dict.fromkeys(before))
        return list(self._after)

    def run(self) -> None:
        """Move the bytes; an error is kept for ``wait``. Called once, by the scheduler."""
        try:
            needed = self._needs
            if needed is not None and needed.error is not None:
                raise ShardwiseError(
                    mismatch(
                        repr(self),
                        expected="a source that was written",
                        got=f"an error of {needed!r}",
                        fix="wait for each copy before the next depends on it to find its error",
                    )
                ) from needed.error
            self._arrival = self._job(self._after)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold pieces of memory
            self._error = error
        finally:
            # what ran before, and the job's hold on memory, are no longer needed
            self._needs, self._after, self._job = None, (), _done
            self._has_run.set()

    def wait_until_run(self) -> None:
        """Block the host until ``run`` has returned."""
        self._has_run.wait()


def _done(after: Sequence[Transfer]) -> Arrival | None:
    """Stand for a job that has run."""
    raise AssertionError("a copy runs once")
