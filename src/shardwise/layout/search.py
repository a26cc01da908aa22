"""Choose the capacity of chunks so that the least is left unused; it does not pack them.

Source: ColossalAI, ``search_chunk_configuration`` (chunk-size search of Gemini), 2022; the same
greedy no-split cost, in elements throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import LayoutError, mismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

TARGET_CHUNK_BYTES = 4 * 2**20
"""Default chunks hold between one and three times this: the range in which exchanges over gloo
and NCCL run at full speed while a handful of chunks are still in flight."""
SEARCH_STEP_BYTES = 2**18
"""Distance between the capacities that the default search tries."""


def search_chunk_numel(
    families: Sequence[Sequence[int]],
    *,
    interval_numel: int,
    range_numel: int,
    min_numel: int = 0,
) -> tuple[int, int]:
    """Return the common chunk size, in elements, that leaves the least unused, and that waste.

    Every family (sizes of parameters in order of use) is filled greedily into chunks of one size
    without splitting a parameter. Sizes from the largest parameter (or ``min_numel``), rounded up
    to ``interval_numel``, over ``range_numel`` are tried in steps of ``interval_numel``; the first
    minimum wins.

    Args:
        families: Parameter sizes, each family packed apart; empty families are ignored.
        interval_numel: Step of the search, at least 1.
        range_numel: Length of the searched range, at least 0.
        min_numel: Smallest size to try.

    Returns:
        ``(chunk_numel, waste_numel)``.

    Raises:
        LayoutError: No interval, a negative range or nothing to pack.

    Example:
        >>> search_chunk_numel([[60, 40, 60, 40]], interval_numel=10, range_numel=60)
        (100, 0)
    """
    if interval_numel < 1 or range_numel < 0:
        raise LayoutError(
            mismatch(
                "search range",
                expected="interval_numel >= 1 and range_numel >= 0",
                got=f"{interval_numel} and {range_numel}",
                fix="pass element counts",
            )
        )
    largest = max((size for family in families for size in family), default=0)
    start = -(-max(largest, min_numel) // interval_numel) * interval_numel
    if start == 0:
        raise LayoutError(
            mismatch(
                "families",
                expected="at least one parameter with elements",
                got="none",
                fix="pass min_numel or a parameter",
            )
        )
    candidates = range(start, start + range_numel + 1, interval_numel)
    waste, chunk_numel = min(
        (sum(unused_numel(family, size) for family in families), size) for size in candidates
    )
    return chunk_numel, waste


def choose_capacity(sizes: Sequence[int], *, itemsize: int) -> int:
    """Return the capacity, in elements, of one family's chunks when the user names none.

    Parameters above the target are left out of the search: they get chunks of their own.
    """
    target = TARGET_CHUNK_BYTES // itemsize
    kept = [size for size in sizes if size <= target]
    if sum(kept) <= target:
        return target
    chunk_numel, _ = search_chunk_numel(
        [kept],
        interval_numel=SEARCH_STEP_BYTES // itemsize,
        range_numel=2 * target,
        min_numel=target,
    )
    return chunk_numel


def unused_numel(sizes: Sequence[int], chunk_numel: int) -> int:
    """Return how many elements a greedy in-order fill without splitting leaves unused."""
    unused = 0
    left = 0
    for size in sizes:
        if size > left:
            unused += left
            left = chunk_numel
        left -= size
    return unused + left
