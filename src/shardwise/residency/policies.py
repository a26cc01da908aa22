"""Where every slice lies between uses: one function for each choice of the user.

All ranks must decide alike: slices are equally long on all of them, and limits and measurements
that are passed in here are the least favourable over the ranks, agreed on beforehand.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from shardwise.options import AdaptiveOffload, StaticOffload
from shardwise.residency.adaptive import adapt
from shardwise.residency.state import Residency, Tier, reside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.residency.adaptive import Needs
    from shardwise.residency.staging import Pace
    from shardwise.residency.state import ChunkBytes, Limits


def choose_residency(
    chunks: Sequence[ChunkBytes],
    offload: StaticOffload | AdaptiveOffload | None,
    *,
    limits: Limits,
    needs: Needs,
    pace: Pace,
) -> Residency:
    """Return where every slice lies under the user's choice.

    Args:
        chunks: Sizes by index.
        offload: What the user chose; None leaves everything on the accelerator.
        limits: For ``AdaptiveOffload``: its budget, resolved and agreed on by the ranks.
        needs: For ``AdaptiveOffload``: what else the accelerator holds.
        pace: For ``AdaptiveOffload``: how moves overlap with uses.

    Raises:
        BudgetError: An adaptive choice does not fit.
    """
    match offload:
        case AdaptiveOffload():
            return adapt(chunks, limits=limits, needs=needs, pace=pace)
        case StaticOffload():
            return divide(chunks, offload)
        case None:
            return divide(chunks, StaticOffload())


def divide(chunks: Sequence[ChunkBytes], choice: StaticOffload) -> Residency:
    """Return the residency that keeps fixed fractions of bytes off the accelerator.

    The chunks that lie elsewhere are spread evenly over the order of use, so that a move can hide
    behind the chunks in between. After every chunk, the bytes elsewhere so far differ from the
    fraction of the bytes so far by at most half of the largest chunk.
    """
    away = Tier.HOST if choice.to == "host" else Tier.DISK
    return reside(
        _spread([chunk.working_bytes for chunk in chunks], choice.parameters, away),
        _spread([chunk.update_bytes for chunk in chunks], choice.optimizer, away),
    )


def _spread(sizes: Sequence[int], fraction: float, away: Tier) -> list[Tier]:
    """Return homes of which an even fraction of bytes is ``away``."""
    share, owed = Fraction(fraction), Fraction(0)
    homes = []
    for size in sizes:
        owed += share * size
        is_away = size > 0 and 2 * owed > size
        if is_away:
            owed -= size
        homes.append(away if is_away else Tier.ACCELERATOR)
    return homes
