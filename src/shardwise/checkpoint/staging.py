"""Host memory for copies of the state while it is written beside training; kept between saves.

Memory that is new costs the processor more than the copy into it: every page is cleared first. So
what one save used is there for the next. It holds what this rank writes, rounded up to segments.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.entries import Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.checkpoint.entries import Entry

SEGMENT_BYTES = 32 * 2**20
_ALIGNMENT_BYTES = 64


class Staging:
    """Memory for one save at a time."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._segments: list[mmap.mmap] = []
        self._number = 0
        """Of the segment that is being filled."""
        self._used_bytes = 0
        """Of that segment."""

    @property
    def held_bytes(self) -> int:
        """Host memory that is kept."""
        return sum(map(len, self._segments))

    def copy(self, entries: Iterable[Entry]) -> tuple[list[Entry], int]:
        """Return entries whose tensors are copies here, and the bytes of these.

        The copies of the time before are overwritten.
        """
        self._number = self._used_bytes = 0
        copies: list[Entry] = []
        num_bytes = 0
        for entry in entries:
            if isinstance(entry, Part) and entry.tensor.numel():
                tensor = entry.tensor.detach()
                copied = self._take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
                copies.append(replace(entry, tensor=copied.copy_(tensor)))
                num_bytes += tensor.nbytes
            else:
                copies.append(entry)
        del self._segments[self._number + 1 :]
        return copies, num_bytes

    def _take(self, num_bytes: int) -> torch.Tensor:
        """Return memory for so many bytes, uint8."""
        while self._number < len(self._segments):
            segment = self._segments[self._number]
            if self._used_bytes + num_bytes <= len(segment):
                break
            self._number, self._used_bytes = self._number + 1, 0
        else:
            segment = _map(max(num_bytes, SEGMENT_BYTES))
            self._segments.append(segment)
        start = self._used_bytes
        self._used_bytes += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return torch.frombuffer(segment, dtype=torch.uint8, count=num_bytes, offset=start)


def _map(num_bytes: int) -> mmap.mmap:
    """Return new memory, in large pages where the system has them."""
    memory = mmap.mmap(-1, num_bytes)
    huge: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    if huge is not None:
        try:
            memory.madvise(huge)
        except OSError:  # a kernel without them
            return memory
    return memory
