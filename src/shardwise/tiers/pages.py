"""Whole pages of anonymous memory as tensors, and a bounded number of them lent in turn."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Generator

PAGE_BYTES = mmap.PAGESIZE
_HUGE_BYTES = 2 * 2**20
"""From here on fewer, larger pages are asked for: clearing small ones takes longer than a copy."""


def round_up(num_bytes: int, multiple_bytes: int) -> int:
    """Return the smallest multiple that is at least ``num_bytes``."""
    return -(-num_bytes // multiple_bytes) * multiple_bytes


class Pages(NamedTuple):
    """Page-aligned memory seen as a tensor and as a buffer of system calls."""

    tensor: torch.Tensor
    """uint8, 1-D."""
    view: memoryview


def map_pages(num_bytes: int, *, is_exact: bool = False) -> Pages:
    """Return zeroed pages that hold ``num_bytes``, at least one; freed with the last reference.

    With ``is_exact`` the tensor has no more bytes than that, and nor has its storage.
    """
    memory = mmap.mmap(-1, max(round_up(num_bytes, PAGE_BYTES), PAGE_BYTES))
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is not None and len(memory) >= _HUGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    with torch.inference_mode(False):
        count = num_bytes if is_exact else -1
        tensor = torch.frombuffer(memory, dtype=torch.uint8, count=count)
    return Pages(tensor, memoryview(memory))


def view_of(memory: torch.Tensor) -> memoryview:
    """Return a uint8 tensor's memory as a buffer of system calls; it does not keep it alive."""
    return memoryview((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())).cast("B")


class BufferPool:
    """Lends at most ``num_buffers`` buffers; who comes later waits for one to return."""

    def __init__(self, *, num_buffers: int, buffer_bytes: int) -> None:
        """Map nothing yet: a buffer is made when it is first needed, and kept."""
        self.buffer_bytes = buffer_bytes
        self._num_to_make = num_buffers
        self._free: list[Pages] = []
        self._changed = threading.Condition()

    @contextmanager
    def lend(self) -> Generator[Pages]:
        """Lend one buffer for the body; its contents are arbitrary."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._num_to_make)
            buffer = self._free.pop() if self._free else None
            if buffer is None:
                self._num_to_make -= 1
        try:
            if buffer is None:
                buffer = map_pages(self.buffer_bytes)
            yield buffer
        finally:
            with self._changed:
                if buffer is None:
                    self._num_to_make += 1
                else:
                    self._free.append(buffer)
                self._changed.notify()

    def close(self) -> None:
        """Unmap what is not lent."""
        with self._changed:
            self._num_to_make += len(self._free)
            self._free.clear()
