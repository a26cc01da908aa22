"""Run copies on a few threads, each after the copies it depends on.

Memory, reads and writes of files have threads of their own, so a slow disk never holds up a copy to
the accelerator.
Threads start with the first copy that needs them.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardwise.errors import ShardwiseError, mismatch
from shardwise.tiers.tier import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.tiers.transfer import Transfer


class WorkerScheduler:
    """Runs a copy as soon as it may, on a thread of its lane."""

    def __init__(self, *, num_memory_workers: int = 2, num_file_workers: int = 2) -> None:
        """Start no thread yet.

        Args:
            num_memory_workers: Copies within memory at once; two cores saturate most machines.
            num_file_workers: Reads at once, and writes: one is checked while the device is at
                another; more of them slow some devices down.
        """
        self._memory = ThreadPoolExecutor(num_memory_workers, "shardwise-memory-copies")
        self._reads = ThreadPoolExecutor(num_file_workers, "shardwise-file-reads")
        self._writes = ThreadPoolExecutor(num_file_workers, "shardwise-file-writes")
        self._changed = threading.Condition()
        self._num_blockers: dict[Transfer, int] = {}
        """Of every copy that has not run: how many it still waits for."""
        self._followers: dict[Transfer, list[Transfer]] = {}
        self._is_closed = False
        self._running: set[int] = set()
        """Threads that are amid a copy."""
        self._at_end: list[Callable[[], None]] = []
        """Called after the last copy."""

    def submit(self, transfer: Transfer, after: Sequence[Transfer]) -> None:
        """Run the copy once those before it have run."""
        with self._changed:
            if self._is_closed:
                raise ShardwiseError(
                    mismatch(
                        "copy",
                        expected="open tiers",
                        got=f"{transfer!r} after close()",
                        fix="copy before the tiers are closed",
                    )
                )
            blockers = [earlier for earlier in after if earlier in self._num_blockers]
            self._num_blockers[transfer] = len(blockers)
            for earlier in blockers:
                self._followers.setdefault(earlier, []).append(transfer)
        if not blockers:
            self._start(transfer)

    def finish(self, transfer: Transfer) -> None:
        """Wait for the thread that runs it."""
        transfer.wait_until_run()

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Wait for all copies and end the threads; not for a copy that this very thread is amid."""
        with self._changed:
            self._is_closed = True
            if threading.get_ident() in self._running:
                self._at_end += [] if then is None else [then]
                return
            self._changed.wait_for(lambda: not self._num_blockers)
        self._end()
        if then is not None:
            then()

    def _end(self) -> None:
        """End the threads."""
        for pool in (self._memory, self._reads, self._writes):
            # no join: the collector may call this from a thread that holds locks of ``threading``
            pool.shutdown(wait=False)

    def _start(self, transfer: Transfer) -> None:
        """Hand a copy without blockers to its lane; one that only queues device work runs here."""
        if transfer.lane is None:
            self._run(transfer)
        else:
            self._pool_of(transfer).submit(self._run, transfer)

    def _pool_of(self, transfer: Transfer) -> ThreadPoolExecutor:
        """Return the threads for a copy: reads from a file never wait behind writes to it."""
        if transfer.lane is Lane.MEMORY:
            return self._memory
        return self._writes if transfer.target.tier.lane is Lane.FILE else self._reads

    def _run(self, transfer: Transfer) -> None:
        """Run a copy, then start those that waited for it alone.

        The collector may close the tiers on this thread at any moment in here; it must not wait for
        what this thread has still to do.
        """
        thread = threading.get_ident()
        is_outermost = thread not in self._running
        self._running.add(thread)
        transfer.run()
        ready: list[Transfer] = []
        with self._changed:
            del self._num_blockers[transfer]
            for follower in self._followers.pop(transfer, []):
                self._num_blockers[follower] -= 1
                if not self._num_blockers[follower]:
                    ready.append(follower)
            self._changed.notify_all()
        for follower in ready:
            self._start(follower)
        if is_outermost:
            self._leave(thread)

    def _leave(self, thread: int) -> None:
        """A thread is amid no copy any more; the last one does what ``close`` has left to it."""
        at_end: list[Callable[[], None]] = []
        with self._changed:
            self._running.discard(thread)
            if not self._num_blockers:
                at_end, self._at_end = self._at_end, []
        if at_end:
            self._end()
        for then in at_end:
            then()
