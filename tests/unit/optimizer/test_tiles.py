"""Tiles cover a slice once, and no piece twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.packing import Piece
from shardwise.optimizer.tiles import CUT_NUMEL, cut_tiles


def record_of(index: int, start: int, numel: int, *, atom_numel: int = 1) -> Any:
    piece = Piece(index=index, slice_start=start, parameter_start=0, numel=numel)
    return SimpleNamespace(piece=piece, numel=numel, atom_numel=atom_numel)


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 9), st.booleans()), max_size=12),
    st.integers(CUT_NUMEL, 400),
    st.integers(0, 30),
)
def test_every_updated_element_is_in_one_part(runs, tile_numel, padding) -> None:
    records, expected, end = [], {}, 0
    for index, (numel, gap, is_updated) in enumerate(runs):
        if is_updated:
            records.append(record_of(index, end, numel))
            expected |= dict.fromkeys(range(end, end + numel), index)
        end += numel + gap
    slice_numel = end + padding
    tiles = cut_tiles(records[::-1], slice_numel, tile_numel=tile_numel)
    assert tiles is not None
    covered = [position for tile in tiles for position in range(tile.start, tile.stop)]
    assert covered == list(range(slice_numel))
    assert all(tile.stop - tile.start <= tile_numel for tile in tiles)
    found = {}
    for tile in tiles:
        for part in tile.parts:
            assert tile.start <= part.start < part.stop <= tile.stop
            assert part.is_piece == (part.stop - part.start == part.record.numel)
            assert (part.start - part.record.piece.slice_start) % CUT_NUMEL == 0
            for position in range(part.start, part.stop):
                assert position not in found
                found[position] = part.record.piece.index
    assert found == expected


def test_a_parameter_that_stays_whole_is_not_cut() -> None:
    records = [record_of(0, 0, 400), record_of(1, 400, 600, atom_numel=600)]
    assert cut_tiles(records, 1200, tile_numel=800) is None
    tiles = cut_tiles(records, 1200, tile_numel=1000)
    assert tiles is not None
    assert [len(tile.parts) for tile in tiles] == [2, 0]
