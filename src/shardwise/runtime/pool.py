"""Memory of chunk-sized and slice-sized buffers, kept for reuse until a pass ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.runtime.meter import Holding

if TYPE_CHECKING:
    from shardwise.runtime.meter import Meter

_OWN_REFERENCES = 2
"""To a storage that one tensor alone refers to: that tensor, and the handle that asks."""


class BufferPool:
    """Buffers that nothing refers to any more, by length and dtype.

    Memory is taken on the thread that runs backward only: that of another thread's allocator arena
    would go back to the system, and be faulted in again, at every step.
    """

    def __init__(self, meter: Meter, *, is_frugal: bool = False) -> None:
        """Hold nothing.

        Args:
            meter: Is told of what is taken.
            is_frugal: Return memory at once, so that what is held depends on no thread's pace.
        """
        self.meter = meter
        self.is_frugal = is_frugal
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Return uninitialised memory like a tensor's, of a number of elements."""
        free = self._free.get((numel, like.dtype))
        if free:
            return free.pop()
        buffer = like.new_empty(numel)
        self.meter.watch(buffer, Holding.BUFFERS)
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Keep a buffer that its user is done with."""
        if self.is_frugal:
            return
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        """Return the memory."""
        self._free.clear()


def has_views(buffer: torch.Tensor) -> bool:
    """Return whether other tensors may share a buffer's memory."""
    if type(buffer) is not torch.Tensor:  # a dry run has no memory to reuse
        return True
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES
