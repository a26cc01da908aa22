"""Pack parameters into chunks whose slices all ranks own in equal parts.

A chunk is a row of slots, one per parameter, cut into ``shard_size`` slices of equal length::

    chunk   |  slot 0  | slot 1 |      slot 2      |pad|
    slices  |      rank 0       |      rank 1          |
    pieces  |  0,0     | 1,0    |      2,1         |      (parameter, rank)

An *atom* is the smallest part of a parameter that a cut may not split: one element, a block, or the
whole parameter. This module does not choose the capacity of chunks: see ``search``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import LayoutError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One parameter to pack."""

    index: int
    """Position of the parameter in the caller's list."""
    numel: int
    """Number of elements, 0 allowed."""
    atom_numel: int = 1
    """Elements that stay together; ``numel`` (or more) keeps the parameter whole."""

    @property
    def is_whole(self) -> bool:
        """True when no cut may go through this parameter."""
        return self.atom_numel > 1 and self.atom_numel >= self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a parameter lies in its chunk: elements ``[start, stop)``."""

    index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """End of the slot in the chunk."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of one parameter that one rank owns: slot intersected with slice."""

    index: int
    slice_start: int
    """First element inside the rank's slice."""
    parameter_start: int
    """First element inside the flattened parameter."""
    numel: int

    @property
    def slice_stop(self) -> int:
        """End of the piece in the slice."""
        return self.slice_start + self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Slots of one chunk and its division into equal slices."""

    slots: tuple[Slot, ...]
    numel: int
    shard_size: int

    @property
    def slice_numel(self) -> int:
        """Elements of one rank's slice."""
        return self.numel // self.shard_size

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def slice_bounds(self, rank: int) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of the chunk that ``rank`` owns."""
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the non-empty pieces of ``rank`` in storage order."""
        start, stop = self.slice_bounds(rank)
        cuts = ((slot, max(slot.start, start), min(slot.stop, stop)) for slot in self.slots)
        return tuple(
            Piece(
                index=slot.index,
                slice_start=low - start,
                parameter_start=low - slot.start,
                numel=high - low,
            )
            for slot, low, high in cuts
            if low < high
        )

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges ``[start, stop)`` of the chunk that are padding."""
        position = 0
        for slot in self.slots:
            if slot.start > position:
                yield position, slot.start
            position = slot.stop
        if position < self.numel:
            yield position, self.numel


def pack(
    items: Sequence[Item],
    *,
    shard_size: int,
    capacity_numel: int,
    alignment_numel: int = 1,
    slice_multiple: int = 1,
) -> list[ChunkLayout]:
    """Pack one family of parameters, in order, into as few chunks as the capacity allows.

    Chunks are trimmed to what they hold; a parameter above the capacity gets a chunk of its own
    size. Whole-atom parameters are packed apart from the others, balanced over the slices.

    Args:
        items: Parameters in order of use; their indices must differ.
        shard_size: Number of equal slices per chunk, at least 1.
        capacity_numel: Elements after which a chunk is closed, at least 1.
        alignment_numel: Every slot and slice starts at a multiple of this many elements.
        slice_multiple: Slices hold a multiple of this many aligned runs, so that a slice can itself
            be cut over another mesh axis.

    Returns:
        Layouts in order of their first parameter; every item has exactly one slot.

    Raises:
        LayoutError: A size is out of range or an index occurs twice.

    Example:
        >>> [layout] = pack([Item(index=0, numel=5)], shard_size=2, capacity_numel=8)
        >>> layout.numel, [piece.numel for piece in layout.pieces(1)]
        (6, [2])
    """
    _check(items, shard_size, capacity_numel, alignment_numel, slice_multiple)
    grid = alignment_numel * slice_multiple
    divisible = [item for item in items if not item.is_whole]
    whole = [item for item in items if item.is_whole]
    layouts = [
        _row(batch, shard_size, alignment_numel, grid)
        for batch in _batches(divisible, capacity_numel, alignment_numel)
    ]
    layouts += _balanced_chunks(whole, shard_size, capacity_numel, alignment_numel, grid)
    return sorted(layouts, key=lambda layout: min(slot.index for slot in layout.slots))


def _check(
    items: Sequence[Item], shard_size: int, capacity: int, alignment: int, multiple: int
) -> None:
    """Refuse sizes that no layout could satisfy."""
    for what, value in (
        ("shard_size", shard_size),
        ("capacity_numel", capacity),
        ("alignment_numel", alignment),
        ("slice_multiple", multiple),
    ):
        if value < 1:
            raise LayoutError(
                mismatch(what, expected="at least 1", got=value, fix="pass a positive number")
            )
    for item in items:
        if item.numel < 0 or item.atom_numel < 1:
            raise LayoutError(
                mismatch(
                    "item",
                    expected="numel >= 0 and atom_numel >= 1",
                    got=item,
                    where=f"index {item.index}",
                    fix="pass the parameter's real sizes",
                )
            )
    if len({item.index for item in items}) != len(items):
        raise LayoutError(
            mismatch(
                "items",
                expected="distinct indices",
                got="an index that occurs twice",
                fix="pass each parameter once",
            )
        )


def _round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def _batches(items: Iterable[Item], capacity: int, alignment: int) -> Iterator[list[Item]]:
    """Split items, in order, into runs that fit the capacity (or are one oversize item)."""
    batch: list[Item] = []
    used = 0
    for item in items:
        need = _round_up(item.numel, math.lcm(alignment, item.atom_numel))
        if batch and used + need > capacity:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += need
    if batch:
        yield batch


def _row(items: Sequence[Item], shard_size: int, alignment: int, grid: int) -> ChunkLayout:
    """Lay items one after the other; slices end at multiples of every atom in the row."""
    position = 0
    slots: list[Slot] = []
    for item in items:
        step = math.lcm(alignment, item.atom_numel)
        grid = math.lcm(grid, item.atom_numel)
        position = _round_up(position, step)
        slots.append(Slot(index=item.index, start=position, numel=item.numel))
        position += item.numel
    numel = _round_up(position, shard_size * grid)
    return ChunkLayout(slots=tuple(slots), numel=numel, shard_size=shard_size)


def _balanced_chunks(
    items: Sequence[Item], shard_size: int, capacity: int, alignment: int, grid: int
) -> list[ChunkLayout]:
    """Pack whole parameters: of the runs that fit the capacity, take the one with least padding."""
    layouts: list[ChunkLayout] = []
    remaining = list(items)
    while remaining:
        first = next(_batches(remaining, capacity, alignment))
        limit = min(len(remaining), max(len(first), shard_size))
        candidates = [
            _balanced(remaining[:count], shard_size, alignment, grid)
            for count in range(1, limit + 1)
        ]
        best = min(candidates, key=lambda layout: (_padding_share(layout), -len(layout.slots)))
        layouts.append(best)
        remaining = remaining[len(best.slots) :]
    return layouts


def _padding_share(layout: ChunkLayout) -> float:
    """Return padding as a share of the chunk."""
    return layout.padding_numel / layout.numel if layout.numel else 0.0


def _balanced(items: Sequence[Item], shard_size: int, alignment: int, grid: int) -> ChunkLayout:
    """Give each whole parameter to the slice with the least load, largest first."""
    loads = [0] * shard_size
    places: dict[int, tuple[int, int]] = {}
    for item in sorted(items, key=lambda item: (-item.numel, item.index)):
        owner = loads.index(min(loads))
        places[item.index] = (owner, loads[owner])
        loads[owner] += _round_up(item.numel, alignment)
    slice_numel = _round_up(max(loads), grid)
    slots = [
        Slot(index=item.index, start=owner * slice_numel + offset, numel=item.numel)
        for item in items
        for owner, offset in (places[item.index],)
    ]
    slots.sort(key=lambda slot: (slot.start, slot.stop))
    return ChunkLayout(slots=tuple(slots), numel=slice_numel * shard_size, shard_size=shard_size)
