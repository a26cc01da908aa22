"""What a rank tells the others at the end of a backward pass, as bits of one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.managed import ManagedParameter


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
    is_weighted: bool
    """Gradients are sums that weights will divide."""


def num_bits(records: Sequence[ManagedParameter], chunks: Sequence[Chunk]) -> int:
    """Return the length of a mask."""
    return 2 * (len(records) + len(chunks)) + 1


def collect(
    records: Sequence[ManagedParameter], chunks: Sequence[Chunk], *, is_weighted: bool
) -> int:
    """Return this rank's facts as a mask."""
    bits = [record.has_arrived for record in records]
    bits += [record.late is not None for record in records]
    bits += [chunk.is_sent for chunk in chunks]
    bits += [chunk.was_read_in_backward for chunk in chunks]
    bits.append(is_weighted)
    return sum(1 << position for position, bit in enumerate(bits) if bit)


def read(mask: int, records: Sequence[ManagedParameter], chunks: Sequence[Chunk]) -> PassFacts:
    """Return the facts in a mask."""
    count, after = len(records), 2 * len(records) + len(chunks)
    return PassFacts(
        used=frozenset(r for i, r in enumerate(records) if mask >> i & 1),
        late=frozenset(r for i, r in enumerate(records) if mask >> (count + i) & 1),
        sent=frozenset(c for i, c in enumerate(chunks) if mask >> (2 * count + i) & 1),
        read=frozenset(c for i, c in enumerate(chunks) if mask >> (after + i) & 1),
        is_weighted=bool(mask >> (after + len(chunks)) & 1),
    )
