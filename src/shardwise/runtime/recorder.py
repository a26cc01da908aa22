"""The trace of the last step: which chunk was used when, and what autograd held by then."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from shardwise.residency import Moment, Segment, Trace, renew
from shardwise.runtime.meter import Holding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.residency import ChunkBytes
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.meter import Meter

_LONGEST_STEP = 2**16
"""Moments that are kept, the last ones: forward passes may never be followed by a step."""


class Recorder:
    """Writes down moments of a step that a meter watches; passes without gradients are none."""

    def __init__(self, meter: Meter) -> None:
        """Know nothing yet."""
        self.trace: Trace | None = None
        """Of the last step; activations are the most that steps in its order have held."""
        self._meter = meter
        self._moments: deque[Moment] = deque(maxlen=_LONGEST_STEP)

    def note(self, chunks: Iterable[Chunk], segment: Segment) -> None:
        """Record a use of some chunks, one after the other."""
        if not self._meter.is_on or segment is Segment.EVALUATION:
            return
        activation_bytes = self._meter.held[Holding.ACTIVATIONS]
        self._moments.extend(Moment(chunk.index, segment, activation_bytes) for chunk in chunks)

    def note_backward(self, chunk: Chunk) -> None:
        """Record that a chunk's backward pass is over."""
        self.note((chunk,), Segment.BACKWARD)

    def end_step(self, sizes: Iterable[ChunkBytes]) -> None:
        """Take what was recorded as a step."""
        moments = tuple(self._moments)
        self._moments.clear()
        if moments:
            self.trace = renew(self.trace, Trace(chunks=tuple(sizes), moments=moments))
