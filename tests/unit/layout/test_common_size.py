"""The chunk size of an earlier manager: its known answers, and none of its faults."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise import LayoutError
from shardwise.layout import Item, pack, search_chunk_size

SMALL_BLOCK = [32, 32, 3072, 96, 1024, 32, 32, 32, 4096, 128, 4096, 32]
"""Of GPT-2, 32 wide: norm, attention in and out, norm, feed-forward in and out; with biases."""
SMALL_GPT = [4096, 2048, *SMALL_BLOCK, *SMALL_BLOCK, 32, 32]
"""2 blocks, 128 words, 64 positions; 31616 elements."""
LARGE_BLOCK = [128, 128, 49152, 384, 16384, 128, 128, 128, 65536, 512, 65536, 128]
"""128 wide."""
LARGE_GPT = [6433024, 131072, *LARGE_BLOCK, *LARGE_BLOCK, 128, 128]
"""2 blocks, 50258 words, 1024 positions."""

FAMILIES = st.dictionaries(
    st.integers(1, 8), st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=3
)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_small_model_fits_one_chunk(num_ranks: int) -> None:
    found = search_chunk_size(
        {num_ranks: SMALL_GPT}, interval_numel=16, range_numel=2**20, multiple_numel=num_ranks
    )
    assert found == (31616, 0)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_an_exceptionally_large_parameter_takes_no_part(num_ranks: int) -> None:
    found = search_chunk_size(
        {num_ranks: LARGE_GPT}, interval_numel=128, range_numel=2**20, multiple_numel=num_ranks
    )
    assert found == (527872, 0)


def test_without_the_filter_the_largest_parameter_sets_the_size() -> None:
    chunk_numel, _ = search_chunk_size(
        {1: LARGE_GPT}, interval_numel=128, range_numel=2**20, filter_exlarge=False
    )
    assert chunk_numel >= 6433024


@settings(deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=40))
def test_exceptional_is_three_standard_deviations_above_the_mean(numels: list[int]) -> None:
    bound = statistics.fmean(numels) + 3 * statistics.pstdev(numels)
    assume(all(abs(numel - bound) > 1e-6 * bound for numel in numels))
    largest = max(numel for numel in numels if numel < bound)
    assert search_chunk_size({1: numels}, interval_numel=1, range_numel=0)[0] == largest


@settings(max_examples=50, deadline=None)
@given(families=FAMILIES, multiple=st.integers(1, 12), min_chunk_numel=st.integers(0, 90))
def test_any_number_of_ranks_divides_the_size_and_the_waste_is_of_that_size(
    families: dict[int, list[int]], multiple: int, min_chunk_numel: int
) -> None:
    chunk_numel, waste_numel = search_chunk_size(
        families,
        interval_numel=4,
        range_numel=40,
        min_chunk_numel=min_chunk_numel,
        filter_exlarge=False,
        multiple_numel=multiple,
    )
    assert chunk_numel % multiple == 0
    assert chunk_numel >= min_chunk_numel
    waste = 0
    for numels in families.values():
        if sum(numels) >= min_chunk_numel:
            items = [Item(index=i, numel=numel) for i, numel in enumerate(numels)]
            layouts = pack(items, shard_size=1, capacity_numel=chunk_numel)
            waste += sum(chunk_numel - layout.numel for layout in layouts)
    assert waste_numel == waste


def test_a_group_below_the_least_size_takes_no_part() -> None:
    alone = search_chunk_size({1: [60, 40]}, interval_numel=10, range_numel=90, min_chunk_numel=50)
    beside = search_chunk_size(
        {1: [60, 40], 2: [30, 9]}, interval_numel=10, range_numel=90, min_chunk_numel=50
    )
    assert alone == beside == (100, 0)


def test_a_group_of_exceptional_parameters_only_is_no_error() -> None:
    families = {1: [10] * 30, 2: [5000]}
    assert search_chunk_size(families, interval_numel=10, range_numel=0) == (10, 0)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"interval_numel": 0}, "interval"), ({"multiple_numel": 0}, "multiple")],
    ids=["interval", "multiple"],
)
def test_sizes_below_one_are_refused(options: dict[str, int], what: str) -> None:
    with pytest.raises(LayoutError, match=what):
        search_chunk_size({1: [5]}, **({"interval_numel": 1, "range_numel": 0} | options))
