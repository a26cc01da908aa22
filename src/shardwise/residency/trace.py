"""What one step uses, moment by moment: recorded once, and looked ahead in ever after.

A *moment* is one use of one chunk. A trace knows no clock and keeps no cursor: questions name the
moment they are asked at, so that passes of another kind in between (an evaluation) shift nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import LayoutError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.residency.state import ChunkBytes


class Segment(Enum):
    """Parts of a step."""

    FORWARD = "forward with gradients"
    EVALUATION = "forward without gradients"
    BACKWARD = "backward"
    UPDATE = "the optimizer's update, which makes gathered values outdated"


class Moment(NamedTuple):
    """One use of one chunk."""

    chunk: int
    segment: Segment
    activation_bytes: int = 0
    """Live bytes on the accelerator that belong to no chunk, at this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step of one rank.

    Example:
        >>> from shardwise.residency.state import ChunkBytes
        >>> uses = [Moment(c, Segment.FORWARD) for c in (0, 1, 0)]
        >>> trace = Trace(chunks=(ChunkBytes(), ChunkBytes()), moments=tuple(uses))
        >>> trace.next_use(1, at=1)
        3
    """

    chunks: tuple[ChunkBytes, ...]
    """Sizes of all chunks, by index."""
    moments: tuple[Moment, ...]
    repeats: bool = True
    """The step follows upon itself; False: nothing is known of what comes after it."""
    _uses: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """Moments of every chunk, ascending."""
    _updates: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Moments of updates, ascending."""

    def __post_init__(self) -> None:
        """Index the moments by chunk."""
        uses: list[list[int]] = [[] for _ in self.chunks]
        for index, moment in enumerate(self.moments):
            if not 0 <= moment.chunk < len(uses):
                raise LayoutError(
                    mismatch(
                        "Trace.moments",
                        expected=f"chunks from 0 to {len(uses) - 1}",
                        got=moment.chunk,
                        where=f"moment {index}",
                        fix="pass the sizes of every chunk that is used",
                    )
                )
            uses[moment.chunk].append(index)
        object.__setattr__(self, "_uses", tuple(map(tuple, uses)))
        updates = [i for i, moment in enumerate(self.moments) if moment.segment is Segment.UPDATE]
        object.__setattr__(self, "_updates", tuple(updates))

    def __len__(self) -> int:
        """Return the number of moments."""
        return len(self.moments)

    # ------------------------------------------------------------------ looking ahead

    def next_use(self, chunk: int, *, at: int) -> int | None:
        """Return how many moments after ``at`` a chunk is used, whatever for; None: never."""
        return self._distance(self._uses[chunk], at)

    def next_read(self, chunk: int, *, at: int) -> int | None:
        """Return how many moments after ``at`` the values of now are read; None: never.

        What was gathered before an update is of no use after it.
        """
        distance = self.next_use(chunk, at=at)
        update = self._distance(self._updates, at)
        return None if distance is None or (update is not None and update <= distance) else distance

    def upcoming(self, *, at: int) -> Iterator[tuple[int, int]]:
        """Yield (distance, chunk) of the reads after ``at`` and up to an update, soonest first."""
        num_moments = len(self.moments)
        ahead = num_moments if self.repeats else num_moments - 1 - at
        for distance in range(1, ahead + 1):
            moment = self.moments[(at + distance) % num_moments]
            if moment.segment is Segment.UPDATE:
                return
            yield distance, moment.chunk

    def _distance(self, indices: Sequence[int], at: int) -> int | None:
        """Return how far after ``at`` the next of some ascending moments is."""
        position = bisect_right(indices, at)
        if position < len(indices):
            return indices[position] - at
        return indices[0] + len(self.moments) - at if indices and self.repeats else None

    # ------------------------------------------------------------------ the step as a whole

    @property
    def first_visits(self) -> tuple[int, ...]:
        """Chunks in order of their first use; a chunk that is never used is not among them."""
        return tuple(dict.fromkeys(moment.chunk for moment in self.moments))

    @property
    def peak_activation_bytes(self) -> int:
        """The most bytes of activations at any moment."""
        return max((moment.activation_bytes for moment in self.moments), default=0)

    def passes(self) -> list[range]:
        """Return the runs of moments of one segment: forward, backward, forward, ..., update."""
        found = []
        start = 0
        for _, run in groupby(self.moments, key=lambda moment: moment.segment):
            stop = start + sum(1 for _ in run)
            found.append(range(start, stop))
            start = stop
        return found

    def has_order_of(self, other: Trace) -> bool:
        """Return whether both use the same chunks, of the same sizes, in the same order."""
        return (
            self.repeats == other.repeats
            and self.chunks == other.chunks
            and [moment[:2] for moment in self.moments] == [moment[:2] for moment in other.moments]
        )


def renew(recorded: Trace | None, seen: Trace) -> Trace:
    """Return the trace to plan with, after a step was seen.

    The very object ``recorded`` is returned where it still holds; anything else calls for a new
    plan. A step in another order replaces it. One in the same order with more activations raises
    its bytes moment by moment, so that batches of alternating sizes settle on the larger ones.
    """
    if recorded is None or not recorded.has_order_of(seen):
        return seen
    pairs = list(zip(recorded.moments, seen.moments, strict=True))
    if all(new.activation_bytes <= old.activation_bytes for old, new in pairs):
        return recorded
    moments = tuple(
        old._replace(activation_bytes=max(old.activation_bytes, new.activation_bytes))
        for old, new in pairs
    )
    return replace(recorded, moments=moments)
