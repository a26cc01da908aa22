"""Whole pages of anonymous memory as tensors, and a bounded number of them lent in turn."""

from __future__ import annotations

import mmap
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Generator

PAGE_BYTES = mmap.PAGESIZE


def round_up(num_bytes: int, multiple_bytes: int) -> int:
    """Return the smallest multiple that is at least ``num_bytes``."""
    return -(-num_bytes // multiple_bytes) * multiple_bytes


class Pages(NamedTuple):
    """Page-aligned memory seen as a tensor and as a buffer of system calls."""

    tensor: torch.Tensor
    """uint8, 1-D."""
    view: memoryview


def map_pages(num_bytes: int) -> Pages:
    """Return zeroed pages that hold ``num_bytes``, at least one; freed with the last reference."""
    memory = mmap.mmap(-1, max(round_up(num_bytes, PAGE_BYTES), PAGE_BYTES))
    with torch.inference_mode(False):
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return Pages(tensor, memoryview(memory))


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
