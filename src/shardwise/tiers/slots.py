"""Which parts of a file are free: integers only, no file.

Space is handed out in one run where one fits, best fit first, and otherwise in several: so what is
free in sum can always be used, however it is scattered, and a budget needs no margin.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Run(NamedTuple):
    """Bytes ``[start, stop)`` of a file."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Length of the run."""
        return self.stop - self.start


class FreeSpace:
    """A sorted list of free runs that never touch: neighbours become one. Not thread-safe."""

    def __init__(self) -> None:
        """Start with nothing free."""
        self._runs: list[Run] = []

    @property
    def runs(self) -> tuple[Run, ...]:
        """The free runs in order."""
        return tuple(self._runs)

    @property
    def free_bytes(self) -> int:
        """Bytes of all runs."""
        return sum(run.num_bytes for run in self._runs)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the longest run."""
        return max((run.num_bytes for run in self._runs), default=0)

    def add(self, run: Run) -> None:
        """Make a run free and join it with its neighbours."""
        if not run.num_bytes:
            return
        at = bisect_left(self._runs, run)
        first, last, start, stop = at, at, run.start, run.stop
        if at > 0 and self._runs[at - 1].stop == start:
            first, start = at - 1, self._runs[at - 1].start
        if at < len(self._runs) and self._runs[at].start == stop:
            last, stop = at + 1, self._runs[at].stop
        before = self._runs[first - 1].stop if first else 0
        after = self._runs[last].start if last < len(self._runs) else stop
        assert before <= start < stop <= after, "a run is freed once"
        self._runs[first:last] = [Run(start, stop)]

    def take(self, num_bytes: int) -> tuple[Run, ...]:
        """Use up ``num_bytes``, which are free in sum; in one run if one is long enough."""
        assert num_bytes <= self.free_bytes, "the caller makes room first"
        fitting = [run for run in self._runs if run.num_bytes >= num_bytes]
        if num_bytes and fitting:
            return (self._cut(min(fitting, key=lambda run: run.num_bytes), num_bytes),)
        taken: list[Run] = []
        while num_bytes:
            longest = max(self._runs, key=lambda run: run.num_bytes)
            taken.append(self._cut(longest, min(num_bytes, longest.num_bytes)))
            num_bytes -= taken[-1].num_bytes
        return tuple(taken)

    def _cut(self, run: Run, num_bytes: int) -> Run:
        """Use up the start of one run."""
        rest = Run(run.start + num_bytes, run.stop)
        at = self._runs.index(run)
        self._runs[at : at + 1] = [rest] if rest.num_bytes else []
        return Run(run.start, rest.start)


def locate(runs: Iterable[Run], position: int, num_bytes: int) -> Iterator[Run]:
    """Yield where bytes ``[position, position + num_bytes)`` of a block lie in the file."""
    stop = position + num_bytes
    run_start = 0
    for run in runs:
        low, high = max(position, run_start), min(stop, run_start + run.num_bytes)
        if low < high:
            yield Run(run.start + low - run_start, run.start + high - run_start)
        run_start += run.num_bytes
