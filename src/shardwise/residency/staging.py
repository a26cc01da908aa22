"""How far moves run ahead of their uses and behind them, and the bytes that this may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import ConfigurationError, mismatch
from shardwise.residency.state import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.residency.state import ChunkBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How moves overlap with uses.

    An update takes what it needs of one chunk after the other::

        moment        u-1         u          u+1
        fetch         chunk u     chunk u+1  chunk u+2
        update        chunk u-1   chunk u    chunk u+1
        write back    chunk u-2   chunk u-1  chunk u        (depth 1)
    """

    gather_bytes: int | None = None
    """Whole chunks take no more than this, unless one alone does; None is no limit."""
    prefetch_bytes: int = 0
    """Bytes of the next chunks that are gathered ahead."""
    depth: int = 1
    """Chunks that are fetched ahead of the one updated, and written back behind it; 0 overlaps
    nothing and needs the fewest bytes."""
    update_tier: Tier = Tier.HOST
    """Where chunks are updated whose state does not lie on the accelerator; what lies on the
    accelerator is updated there."""

    holds_gradients: bool = True
    """Reduced gradients wait on the accelerator for their way to another tier; False where they are
    copied at once, out of buffers that count as something else."""

    def __post_init__(self) -> None:
        """Refuse a pace that nothing could keep."""
        sizes = (self.gather_bytes or 0, self.prefetch_bytes, self.depth)
        if min(sizes) < 0 or self.update_tier is Tier.DISK:
            raise ConfigurationError(
                mismatch(
                    "Pace",
                    expected="sizes from 0 and updates on the accelerator or the host",
                    got=self,
                    fix="change that field",
                )
            )


class Staging(NamedTuple):
    """Bytes of copies away from home, at most, at any moment."""

    accelerator_bytes: int
    host_bytes: int


def bound_staging(
    chunks: Sequence[ChunkBytes], pace: Pace, *, has_updates_away: bool, uses_disk: bool
) -> Staging:
    """Return how many bytes the copies of a schedule may take beside the homes.

    A bound for any order of use, since it is needed before the first step.

    Args:
        chunks: Sizes by index.
        pace: How far moves run ahead and behind.
        has_updates_away: Some chunk's update does not lie on the accelerator.
        uses_disk: Some slice lies on disk; it passes through host memory on its way.
    """
    gradients = _largest((c.gradient_bytes for c in chunks), pace.depth + 1)
    updates = [c.update_bytes + c.working_bytes for c in chunks if c.update_bytes]
    on_accelerator = on_host = 0
    if has_updates_away:
        on_accelerator += gradients if pace.holds_gradients else 0
        if pace.update_tier is Tier.ACCELERATOR:
            on_accelerator += _largest(updates, 2 * pace.depth + 1)
        else:
            on_host += _largest((c.working_bytes for c in chunks), pace.depth + 1)
    if uses_disk:
        # One more than the pipeline holds: a fetch that nothing hides, and the way back, share a
        # moment.
        passing = [
            c.update_bytes
            + c.copy_bytes
            + c.working_bytes
            - c.gradient_bytes
            + c.host_padding_bytes * (c.num_update_slices + 1)
            for c in chunks
            if c.update_bytes
        ]
        on_host = _largest([*passing, max(passing, default=0)], 2 * pace.depth + 2)
        on_host += _working_in_flight(chunks, pace.prefetch_bytes)
    return Staging(on_accelerator, on_host)


def _working_in_flight(chunks: Sequence[ChunkBytes], prefetch_bytes: int) -> int:
    """Return how many bytes of working slices travel for gathers that were started."""
    largest = max((c.whole_bytes for c in chunks), default=0)
    window_bytes = largest + prefetch_bytes
    travelling = max(
        (-(-window_bytes * c.working_bytes // c.whole_bytes) for c in chunks if c.whole_bytes),
        default=0,
    )
    return min(travelling, sum(c.working_bytes for c in chunks))


def _largest(sizes: Iterable[int], count: int) -> int:
    """Return the sum of the largest sizes."""
    return sum(sorted(sizes, reverse=True)[:count])
