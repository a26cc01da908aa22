"""What a rank tells the others at the end of a backward pass, as bits of one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.managed import ManagedParameter

MemberT = TypeVar("MemberT")


@dataclass(frozen=True, slots=True)
class PassFacts:
    """Facts of one backward pass: of this rank when collected, of all ranks when read back."""

    used: frozenset[ManagedParameter]
    """A gradient came in time for its chunk."""
    late: frozenset[ManagedParameter]
    """A gradient came after its chunk was sent."""
    sent: frozenset[Chunk]
    """Chunks whose reduction was started during the pass."""
    read: frozenset[Chunk]
    """Chunks whose values a backward pass has read."""
    replaced: frozenset[ManagedParameter]
    """The user has put another gradient in the place of the reduced one."""
    is_weighted: bool
    """Gradients are sums that weights will divide."""
    is_unweighted: bool
    """Gradients came that no weight belongs to."""


def num_bits(records: Sequence[ManagedParameter], chunks: Sequence[Chunk]) -> int:
    """Return the length of a mask."""
    return 3 * len(records) + 2 * len(chunks) + 2


def collect(
    records: Sequence[ManagedParameter], chunks: Sequence[Chunk], *, is_weighted: bool
) -> int:
    """Return this rank's facts as a mask."""
    has_any = any(record.has_arrived or record.late is not None for record in records)
    bits = [
        *(record.has_arrived for record in records),
        *(record.late is not None for record in records),
        *(record.is_replaced for record in records),
        *(chunk.is_sent for chunk in chunks),
        *(chunk.was_read_in_backward for chunk in chunks),
        is_weighted,
        has_any and not is_weighted,
    ]
    return sum(1 << position for position, bit in enumerate(bits) if bit)


def read(mask: int, records: Sequence[ManagedParameter], chunks: Sequence[Chunk]) -> PassFacts:
    """Return the facts in a mask."""
    bits = (mask >> position & 1 for position in range(num_bits(records, chunks)))
    used, late, replaced = (_chosen(records, bits) for _ in range(3))
    sent, was_read = (_chosen(chunks, bits) for _ in range(2))
    return PassFacts(
        used=used,
        late=late,
        sent=sent,
        read=was_read,
        replaced=replaced,
        is_weighted=bool(next(bits)),
        is_unweighted=bool(next(bits)),
    )


def learn(said: PassFacts, chunks: Sequence[Chunk]) -> None:
    """Note which values backward passes need."""
    for chunk in chunks:
        chunk.was_read_in_backward = False
        # all of it got gradients, and none of these depended on values
        is_never_read = chunk not in said.read and said.used.issuperset(chunk.records)
        chunk.is_needed_in_backward = not is_never_read


def _chosen(members: Sequence[MemberT], bits: Iterator[int]) -> frozenset[MemberT]:
    """Return those that the next bits name."""
    return frozenset([member for member in members if next(bits)])
