"""Which gathered chunks to let go, and which to gather ahead: decisions at one moment.

Nothing is moved here. Who carries a decision out tells what is gathered (least recently used
first) and gets indices of chunks back. All ranks see the same sizes and record the same order, so
all decide alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.residency.trace import Trace


class Gathered(NamedTuple):
    """A chunk that is whole, or on its way to be."""

    chunk: int
    whole_bytes: int
    is_pinned: bool = False
    """It must stay: something that runs now reads it."""


class Room(NamedTuple):
    """How room is made."""

    victims: tuple[int, ...]
    """Chunks to let go, in this order."""
    fits: bool
    """What room was asked for fits once they are gone."""


class Prefetch(NamedTuple):
    """A gather to start before its use."""

    chunk: int
    victims: tuple[int, ...]
    """Chunks to let go before it."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """What is known of the future: a trace, and the moment that it is asked at."""

    trace: Trace
    at: int
    """Index of the moment that is running."""

    def distance(self, chunk: int) -> float:
        """Return how many moments ahead a chunk is read; infinity for never."""
        found = self.trace.next_read(chunk, at=self.at)
        return math.inf if found is None else found


def choose_victims(
    held: Sequence[Gathered],
    *,
    needed_bytes: int,
    limit_bytes: float,
    foresight: Foresight | None = None,
    beyond: int = 0,
) -> Room:
    """Return which chunks to let go so that ``needed_bytes`` more fit into the limit.

    The chunk whose next read lies furthest ahead goes first, and among equals - all of them, where
    nothing is foreseen - the least recently used. For chunks of one size no choice needs fewer
    gathers.

    Args:
        held: What is gathered, least recently used first.
        needed_bytes: Room to make.
        limit_bytes: What all gathered chunks may take; may be infinity.
        foresight: What is known of the future; None is nothing.
        beyond: Chunks that are read this many moments ahead, or sooner, stay.

    Returns:
        Chunks to let go. Where even that is not enough, ``fits`` is False: whoever must have the
        room lets them go and takes it nevertheless, and whoever could wait lets nothing go.

    Source: Belady, A Study of Replacement Algorithms for a Virtual-Storage Computer, 1966.

    Example:
        >>> choose_victims([Gathered(0, 8), Gathered(1, 8)], needed_bytes=8, limit_bytes=16)
        Room(victims=(0,), fits=True)
    """
    excess = sum(gathered.whole_bytes for gathered in held) + needed_bytes - limit_bytes
    if excess <= 0:
        return Room((), fits=True)
    distances = [
        (math.inf if foresight is None else foresight.distance(gathered.chunk), gathered)
        for gathered in held
        if not gathered.is_pinned
    ]
    victims: list[int] = []
    for _, gathered in sorted(
        (pair for pair in distances if pair[0] > beyond), key=lambda pair: -pair[0]
    ):
        if excess <= 0:
            break
        victims.append(gathered.chunk)
        excess -= gathered.whole_bytes
    return Room(tuple(victims), fits=excess <= 0)


def choose_prefetches(
    held: Sequence[Gathered], *, foresight: Foresight, limit_bytes: float, prefetch_bytes: int
) -> tuple[Prefetch, ...]:
    """Return the gathers to start now, ahead of their use.

    A gather is moved forward, never added: what would be gathered next is gathered now if what it
    would then replace can go already, because it is not read in between. So the gathers of a step
    are those of fetching on demand, each as soon as it does no harm, and never more. The price is
    that a prefetch sometimes waits although the limit has room for a worse choice.

    Args:
        held: What is gathered, least recently used first; the chunk in use is among them.
        foresight: What is known of the future.
        limit_bytes: What all gathered chunks may take; may be infinity.
        prefetch_bytes: How far to look ahead: bytes of the chunks that are read next, whether
            they are there or not.

    Source: Cao, Felten, Karlin and Li, A Study of Integrated Prefetching and Caching Strategies,
    1995: "optimal replacement" and "do no harm".
    """
    trace, at = foresight.trace, foresight.at
    current = trace.moments[at].chunk
    coming = {gathered.chunk: gathered for gathered in held}
    """What would be held at the moment looked at, least recently used first."""
    if current in coming:  # it is pinned now, and like any other by then
        coming[current] = coming[current]._replace(is_pinned=False)
    reads = {current}
    ahead_bytes = 0
    chosen: list[Prefetch] = []
    for distance, chunk in trace.upcoming(at=at):
        whole_bytes = trace.chunks[chunk].whole_bytes
        if not whole_bytes:  # always whole
            continue
        if chunk in coming:
            coming[chunk] = coming.pop(chunk)
        if chunk not in reads:
            ahead_bytes += whole_bytes
            if ahead_bytes > prefetch_bytes:
                break
        if chunk not in coming:
            room = choose_victims(
                list(coming.values()),
                needed_bytes=whole_bytes,
                limit_bytes=limit_bytes,
                foresight=Foresight(trace, at + distance),
            )
            if not room.fits or not reads.isdisjoint(room.victims):
                break
            for victim in room.victims:
                del coming[victim]
            coming[chunk] = Gathered(chunk, whole_bytes)
            chosen.append(Prefetch(chunk, room.victims))
        reads.add(chunk)
    return tuple(chosen)
