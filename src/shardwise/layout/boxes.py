"""Cover a run of a tensor's elements with boxes: n-D rectangles, as DCP stores tensors.

Integers only. A run that starts and ends inside rows needs at most ``2 * (ndim - 1) + 1`` boxes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One rectangle of a tensor, and where its elements lie in the run that it covers a part of."""

    offset: tuple[int, ...]
    """First index in every dim."""
    size: tuple[int, ...]
    """Length in every dim."""
    order: tuple[int, ...]
    """Dims from the outermost to the innermost in memory."""
    start: int
    """First element inside the run; the box's elements follow without holes, in ``order``."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)


def cover(start: int, stop: int, shape: Sequence[int], stride: Sequence[int]) -> list[Box]:
    """Cover elements ``[start, stop)`` of a dense tensor, counted as they lie in memory.

    Args:
        start: First element.
        stop: End of the run; a run without elements has no boxes.
        shape: Of the tensor.
        stride: Of the tensor, dense: any order of dims, no holes.

    Example:
        >>> [(box.offset, box.size) for box in cover(2, 8, (4, 3), (3, 1))]
        [((0, 2), (1, 1)), ((1, 0), (1, 3)), ((2, 0), (1, 2))]
    """
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] != 1, dim)))
    rows = tuple(shape[dim] for dim in order)
    boxes: list[Box] = []
    place = 0
    for offset, size in _cover_rows(start, stop, rows):
        back = {dim: position for position, dim in enumerate(order)}
        box = Box(
            offset=tuple(offset[back[dim]] for dim in range(len(shape))),
            size=tuple(size[back[dim]] for dim in range(len(shape))),
            order=order,
            start=place,
        )
        boxes.append(box)
        place += box.numel
    return boxes


def _cover_rows(
    start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, size) of boxes that cover a run of a row-major tensor, in memory order."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield (), ()
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = shape[1:]
    row_numel = math.prod(inner)
    (row, head), (last, tail) = divmod(start, row_numel), divmod(stop, row_numel)
    if row == last:
        for offset, size in _cover_rows(head, tail, inner):
            yield (row, *offset), (1, *size)
        return
    if head:
        for offset, size in _cover_rows(head, row_numel, inner):
            yield (row, *offset), (1, *size)
        row += 1
    if last > row:
        yield (row, *[0] * len(inner)), (last - row, *inner)
    for offset, size in _cover_rows(0, tail, inner):
        yield (last, *offset), (1, *size)
