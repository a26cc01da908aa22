"""Choose one chunk size for several groups of ranks, by the rules of an earlier chunk manager.

This library chooses by ``search.choose_capacity``; these rules are for who asks for theirs. All
sizes are numbers of elements.

Source: ColossalAI, ``search_chunk_configuration`` (Gemini), 2022 and 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import LayoutError, mismatch
from shardwise.layout.search import search_chunk_numel, unused_numel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OUTLIER_DEVIATIONS = 3
"""A parameter is exceptionally large if it is this many standard deviations above the mean."""


def search_chunk_size(
    numels_by_group: Mapping[int, Sequence[int]],
    *,
    interval_numel: int,
    range_numel: int,
    min_chunk_numel: int = 0,
    filter_exlarge: bool = True,
    multiple_numel: int = 1,
) -> tuple[int, int]:
    """Return the chunk size common to all groups that leaves the least unused, and that waste.

    A group below ``min_chunk_numel`` as a whole gets a chunk of exactly its size and takes no part.
    Exceptionally large parameters get chunks of their own and take no part either: those above
    mean + 3 standard deviations of all parameters, of all groups.

    Args:
        numels_by_group: Sizes of parameters in order of use, by the number of ranks that share
            them.
        interval_numel: Step of the search, at least 1.
        range_numel: Length of the searched range, at least 0.
        min_chunk_numel: Smallest size to try.
        filter_exlarge: Leave exceptionally large parameters out.
        multiple_numel: The answer is rounded up to a multiple of this, for example the least common
            multiple of the numbers of ranks.

    Returns:
        ``(chunk_numel, waste_numel)``, the waste at the size returned.

    Raises:
        LayoutError: No interval, a negative range, no multiple or nothing to pack.

    Example:
        >>> search_chunk_size({2: [60, 40, 60, 40]}, interval_numel=10, range_numel=60)
        (100, 0)
    """
    if multiple_numel < 1:
        raise LayoutError(
            mismatch(
                "multiple_numel",
                expected="at least 1",
                got=multiple_numel,
                fix="pass the least common multiple of the numbers of ranks",
            )
        )
    everything = [numel for numels in numels_by_group.values() for numel in numels]
    exlarge = _find_exlarge(everything) if filter_exlarge else frozenset()
    families = [
        [numel for numel in numels if numel not in exlarge]
        for numels in numels_by_group.values()
        if sum(numels) >= min_chunk_numel
    ]
    found_numel, waste_numel = search_chunk_numel(
        families,
        interval_numel=interval_numel,
        range_numel=range_numel,
        min_numel=min_chunk_numel,
    )
    chunk_numel = -(-found_numel // multiple_numel) * multiple_numel
    if chunk_numel != found_numel:
        waste_numel = sum(unused_numel(family, chunk_numel) for family in families)
    return chunk_numel, waste_numel


def _find_exlarge(numels: Sequence[int]) -> frozenset[int]:
    """Return the sizes that are exceptional among all; in integers, so that ranks cannot differ."""
    count, total = len(numels), sum(numels)
    scaled_variance = count * sum(numel * numel for numel in numels) - total * total
    least_square = OUTLIER_DEVIATIONS**2 * scaled_variance
    excesses = {numel: count * numel - total for numel in numels}
    return frozenset(
        numel for numel, excess in excesses.items() if excess > 0 and excess * excess > least_square
    )
