"""All gathers of one step, foretold: the decisions of ``eviction``, replayed over a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.residency.eviction import (
    Foresight,
    Gathered,
    choose_prefetches,
    choose_victims,
)
from shardwise.residency.trace import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.residency.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """One time that a chunk is whole."""

    chunk: int
    after_moment: int
    """Started as this moment begins; its bytes are taken from here on."""
    before_moment: int
    """Waited for before this moment, its first use; the same moment where nothing hides it."""
    until_moment: int
    """Let go as this moment begins; the number of moments at the end of the step."""


def foretell_gathers(
    trace: Trace, *, limit_bytes: float, prefetch_bytes: int = 0
) -> tuple[Gather, ...]:
    """Return the gathers of a step that begins and ends with nothing gathered.

    Chunks stay from forward to backward as far as the limit allows, which saves their second
    gather, and are let go before an update. A chunk above the limit is gathered all the same,
    alone. Chunks without ``whole_bytes`` are always whole and need no gather.

    Args:
        trace: The step.
        limit_bytes: What all gathered chunks may take; may be infinity.
        prefetch_bytes: See ``choose_prefetches``.
    """
    replay = _Replay(replace(trace, repeats=False))
    for at, moment in enumerate(trace.moments):
        if moment.segment is Segment.UPDATE:
            replay.let_go(list(replay.held), at)
        elif trace.chunks[moment.chunk].whole_bytes:
            replay.read(moment.chunk, at, limit_bytes=limit_bytes, prefetch_bytes=prefetch_bytes)
    replay.let_go(list(replay.held), len(trace))
    return tuple(sorted(replay.done, key=lambda gather: (gather.after_moment, gather.chunk)))


class _Replay:
    """What is gathered while a trace is replayed; it lives for one call."""

    def __init__(self, trace: Trace) -> None:
        """Hold nothing."""
        self.trace = trace
        self.held: dict[int, int] = {}
        """Chunk -> moment of its start; least recently used first."""
        self.arrived: dict[int, int] = {}
        """Chunk -> moment of its first use."""
        self.done: list[Gather] = []

    def read(self, chunk: int, at: int, *, limit_bytes: float, prefetch_bytes: int) -> None:
        """Use a chunk and gather ahead."""
        foresight = Foresight(self.trace, at)
        if chunk not in self.held:
            room = choose_victims(
                self._gathered(),
                needed_bytes=self.trace.chunks[chunk].whole_bytes,
                limit_bytes=limit_bytes,
                foresight=foresight,
            )
            self.let_go(room.victims, at)
            self.held[chunk] = at
        self.held[chunk] = self.held.pop(chunk)
        self.arrived.setdefault(chunk, at)
        for prefetch in choose_prefetches(
            self._gathered(pinned=chunk),
            foresight=foresight,
            limit_bytes=limit_bytes,
            prefetch_bytes=prefetch_bytes,
        ):
            self.let_go(prefetch.victims, at)
            self.held[prefetch.chunk] = at

    def let_go(self, chunks: Iterable[int], at: int) -> None:
        """Let chunks go as a moment begins."""
        for chunk in chunks:
            gather = Gather(
                chunk=chunk,
                after_moment=self.held.pop(chunk),
                before_moment=self.arrived.pop(chunk),
                until_moment=at,
            )
            self.done.append(gather)

    def _gathered(self, *, pinned: int | None = None) -> list[Gathered]:
        """Return what is held in the form that decisions take."""
        return [
            Gathered(chunk, self.trace.chunks[chunk].whole_bytes, is_pinned=chunk == pinned)
            for chunk in self.held
        ]
