"""Invariants of packing, whatever the sizes, atoms and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import LayoutError
from shardwise.layout import ChunkLayout, Item, choose_capacity, pack, search_chunk_numel

sizes = st.lists(st.integers(0, 300), min_size=0, max_size=25)
shard_sizes = st.integers(1, 9)
capacities = st.integers(1, 400)
alignments = st.sampled_from([1, 2, 4, 16])
multiples = st.integers(1, 4)


def items_of(numels: list[int], atoms: list[int]) -> list[Item]:
    return [
        Item(index=i, numel=n, atom_numel=atoms[i % len(atoms)] if atoms else 1)
        for i, n in enumerate(numels)
    ]


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[Item], list[ChunkLayout], dict[str, int]]:
    items = items_of(draw(sizes), draw(st.lists(st.sampled_from([1, 1, 3, 8, 10_000]), max_size=6)))
    settings_ = {
        "shard_size": draw(shard_sizes),
        "capacity_numel": draw(capacities),
        "alignment_numel": draw(alignments),
        "slice_multiple": draw(multiples),
    }
    return items, pack(items, **settings_), settings_


@given(packings())
def test_every_parameter_has_one_slot_of_its_size(packing) -> None:
    items, layouts, _ = packing
    slots = {slot.index: slot for layout in layouts for slot in layout.slots}
    assert sum(len(layout.slots) for layout in layouts) == len(items)
    assert {i: slot.numel for i, slot in slots.items()} == {i.index: i.numel for i in items}


@given(packings())
def test_slots_are_apart_aligned_and_inside(packing) -> None:
    _, layouts, options = packing
    for layout in layouts:
        position = 0
        for slot in layout.slots:
            assert slot.start >= position
            assert slot.start % options["alignment_numel"] == 0
            position = slot.stop
        assert position <= layout.numel


@given(packings())
def test_slices_are_equal_and_cover_the_chunk(packing) -> None:
    _, layouts, options = packing
    grid = options["alignment_numel"] * options["slice_multiple"]
    for layout in layouts:
        bounds = [layout.slice_bounds(rank) for rank in range(options["shard_size"])]
        assert [stop - start for start, stop in bounds] == [layout.slice_numel] * len(bounds)
        assert bounds[0][0] == 0
        assert bounds[-1][1] == layout.numel
        assert layout.slice_numel % grid == 0


@given(packings())
def test_pieces_of_all_ranks_are_the_parameter_in_order(packing) -> None:
    _, layouts, options = packing
    for layout in layouts:
        covered: dict[int, int] = {}
        for rank in range(options["shard_size"]):
            start, stop = layout.slice_bounds(rank)
            for piece in layout.pieces(rank):
                slot = next(s for s in layout.slots if s.index == piece.index)
                assert piece.numel > 0
                assert covered.get(piece.index, 0) == piece.parameter_start
                assert start + piece.slice_start == slot.start + piece.parameter_start
                assert piece.slice_stop <= stop - start
                covered[piece.index] = piece.parameter_start + piece.numel
        for slot in layout.slots:
            assert covered.get(slot.index, 0) == slot.numel


@given(packings())
def test_no_cut_goes_through_an_atom(packing) -> None:
    items, layouts, options = packing
    atoms = {item.index: max(1, min(item.atom_numel, item.numel)) for item in items}
    for layout in layouts:
        for rank in range(options["shard_size"]):
            for piece in layout.pieces(rank):
                atom = atoms[piece.index]
                end = piece.parameter_start + piece.numel
                numel = next(s.numel for s in layout.slots if s.index == piece.index)
                assert piece.parameter_start % atom == 0
                assert end % atom == 0 or end == numel


@given(packings())
def test_gaps_are_exactly_the_padding(packing) -> None:
    _, layouts, _ = packing
    for layout in layouts:
        inside = [range(slot.start, slot.stop) for slot in layout.slots if slot.numel]
        gaps = list(layout.gaps())
        assert sum(stop - start for start, stop in gaps) == layout.padding_numel
        for start, stop in gaps:
            assert all(stop <= used.start or used.stop <= start for used in inside)


@given(numels=sizes, shard_size=shard_sizes, capacity=capacities)
def test_padding_of_unaligned_chunks_is_below_one_element_a_rank(
    numels: list[int], shard_size: int, capacity: int
) -> None:
    for layout in pack(items_of(numels, []), shard_size=shard_size, capacity_numel=capacity):
        assert layout.padding_numel < shard_size
        total = layout.numel - layout.padding_numel
        assert total <= capacity or len([s for s in layout.slots if s.numel]) == 1


@given(numels=st.lists(st.integers(1, 300), min_size=1, max_size=20), shard_size=shard_sizes)
def test_whole_parameters_lie_in_one_slice(numels: list[int], shard_size: int) -> None:
    items = [Item(index=i, numel=n, atom_numel=max(2, n)) for i, n in enumerate(numels)]
    for layout in pack(items, shard_size=shard_size, capacity_numel=1000):
        owned = [piece.index for rank in range(shard_size) for piece in layout.pieces(rank)]
        assert sorted(owned) == sorted(slot.index for slot in layout.slots)


def test_equal_whole_parameters_leave_no_padding() -> None:
    items = [Item(index=i, numel=64, atom_numel=64) for i in range(12)]
    layouts = pack(items, shard_size=3, capacity_numel=300)
    assert sum(layout.padding_numel for layout in layouts) == 0


def test_one_huge_parameter_gets_a_chunk_of_its_own() -> None:
    layouts = pack(items_of([5, 1000, 5], []), shard_size=4, capacity_numel=64)
    assert [[slot.index for slot in layout.slots] for layout in layouts] == [[0], [1], [2]]
    assert layouts[1].numel == 1000


@pytest.mark.parametrize("name", ["shard_size", "capacity_numel", "alignment_numel"])
def test_sizes_below_one_are_refused(name: str) -> None:
    options = {"shard_size": 2, "capacity_numel": 8, "alignment_numel": 1} | {name: 0}
    with pytest.raises(LayoutError, match=name):
        pack([Item(index=0, numel=3)], **options)


def test_negative_sizes_and_repeated_indices_are_refused() -> None:
    with pytest.raises(LayoutError, match="numel >= 0"):
        pack([Item(index=0, numel=-1)], shard_size=1, capacity_numel=8)
    with pytest.raises(LayoutError, match="distinct"):
        pack([Item(index=0, numel=1)] * 2, shard_size=1, capacity_numel=8)


@settings(max_examples=50)
@given(
    families=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=1, max_size=3),
    interval=st.integers(1, 9),
    span=st.integers(0, 60),
)
def test_the_search_returns_the_first_minimum(
    families: list[list[int]], interval: int, span: int
) -> None:
    chunk, waste = search_chunk_numel(families, interval_numel=interval, range_numel=span)

    def waste_of(size: int) -> int:
        total = 0
        for family in families:
            layouts = pack(items_of(family, []), shard_size=1, capacity_numel=size)
            total += sum(size - layout.numel for layout in layouts)
        return total

    start = -(-max(map(max, families)) // interval) * interval
    tried = {size: waste_of(size) for size in range(start, start + span + 1, interval)}
    assert waste == tried[chunk] == min(tried.values())
    assert chunk == min(size for size, value in tried.items() if value == waste)


def test_the_search_knows_a_public_answer() -> None:
    width, vocabulary, positions = 32, 128, 64
    block = [width, width, 3 * width**2, 3 * width, width**2, width, width, width]
    block += [4 * width**2, 4 * width, 4 * width**2, width]
    family = [vocabulary * width, positions * width, *block, *block, width, width]
    found = search_chunk_numel([family], interval_numel=16, range_numel=2**16)
    assert found == (31616, 0)


def test_the_default_capacity_is_counted_in_bytes() -> None:
    sizes_numel = [1_000_000] * 20
    assert choose_capacity(sizes_numel, itemsize=2) == 2 * choose_capacity(
        [500_000] * 20, itemsize=4
    )
