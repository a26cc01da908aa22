"""Blocks that operators can use: on the accelerator, and in host memory.

Without an accelerator the accelerator tier is a stand-in: ordinary memory with a budget of its own.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from shardwise.tiers.block import Block
from shardwise.tiers.pages import map_pages
from shardwise.tiers.tier import HOST_DEVICE, Lane, Tier

if TYPE_CHECKING:
    from shardwise.tiers.block import Remains
    from shardwise.tiers.pinned import PinnedMemory
    from shardwise.tiers.tier import OpenPieces, Pieces

_MAPPED_BYTES = 2**20
"""Smaller blocks are not worth a mapping of their own."""


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialised elements that may be written under any mode of autograd."""
    with torch.inference_mode(False):  # an inference tensor could not be written outside of it
        return torch.empty(numel, dtype=dtype, device=device)


def _is_dry_run() -> bool:
    """Return whether tensors have no memory now (``FakeTensorMode``)."""
    return type(torch.empty(0)) is not torch.Tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D tensor's memory as uint8, without a copy."""
    return tensor.view(torch.uint8)


def open_memory(block: Block) -> OpenPieces:
    """Return a memory block's bytes as one piece."""
    return nullcontext((as_bytes(block.tensor),))


def fill_memory(block: Block, pieces: Pieces) -> None:
    """Write pieces into a memory block one after the other."""
    target, start = as_bytes(block.tensor), 0
    for piece in pieces:
        part = target[start : start + piece.numel()]
        # what was read in place is part of the target already
        if part.untyped_storage()._cdata != piece.untyped_storage()._cdata:
            part.copy_(piece)
        start += piece.numel()
    assert start == target.numel(), "copies are checked to have one size"


class AcceleratorTier(Tier):
    """Device memory, from torch's allocator; counts elements exactly, not torch's rounding of them.

    Blocks belong to the stream on which they are allocated, as every tensor of torch does.
    """

    def __init__(self, device: torch.device, *, budget_bytes: int | None = None) -> None:
        """Hold nothing yet on ``device``, which may be the CPU."""
        super().__init__("accelerator", budget_bytes=budget_bytes, lane=Lane.MEMORY)
        self._device = device

    @property
    def device(self) -> torch.device:
        """The accelerator, or the CPU that stands for it."""
        return self._device

    def footprint_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the elements."""
        return numel * dtype.itemsize

    def open_pieces(self, block: Block, place: torch.Tensor | None = None) -> OpenPieces:
        """Read the block as one piece."""
        return open_memory(block)

    def write_pieces(self, block: Block, pieces: Pieces) -> None:
        """Fill the block."""
        fill_memory(block, pieces)

    def _create(self, numel: int, dtype: torch.dtype) -> Block:
        """Allocate on the device."""
        return Block(self, numel=numel, dtype=dtype, tensor=empty(numel, dtype, self._device))

    def _destroy(self, block: Block, remains: Remains) -> None:
        """Let torch reuse the memory, after side streams are done with it.

        The allocator reuses memory in the order of the current stream, so that stream waits.
        """
        for arrival in remains.arrivals:
            arrival.wait()

    def _release_resources(self) -> None:
        """Hold nothing beside the blocks."""


class HostTier(Tier):
    """CPU memory; page-locked where that lets a device copy while the host goes on.

    Ordinary memory counts elements exactly; page-locked memory counts whole pages.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        pinned: PinnedMemory | None = None,
        is_mapped: bool = False,
    ) -> None:
        """Hold nothing yet.

        Args:
            budget_bytes: Bytes it may hold; None for no limit of its own.
            pinned: Hands out page-locked memory; None for ordinary memory.
            is_mapped: Large blocks start at a page, where a file can be read into them.
        """
        super().__init__("host", budget_bytes=budget_bytes, lane=Lane.MEMORY)
        self._pinned = pinned
        self._is_mapped = is_mapped

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return HOST_DEVICE

    @property
    def is_pinned(self) -> bool:
        """Whether blocks are page-locked."""
        return self._pinned is not None

    def footprint_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the elements, or of the pages that they take."""
        num_bytes = numel * dtype.itemsize
        return num_bytes if self._pinned is None else self._pinned.round_up(num_bytes)

    def open_pieces(self, block: Block, place: torch.Tensor | None = None) -> OpenPieces:
        """Read the block as one piece."""
        return open_memory(block)

    def write_pieces(self, block: Block, pieces: Pieces) -> None:
        """Fill the block."""
        fill_memory(block, pieces)

    def _create(self, numel: int, dtype: torch.dtype) -> Block:
        """Allocate on the host."""
        num_bytes = numel * dtype.itemsize
        if self._pinned is not None and numel:
            tensor = self._pinned.take(num_bytes)[:num_bytes].view(dtype)
        elif self._is_mapped and num_bytes >= _MAPPED_BYTES and not _is_dry_run():
            tensor = map_pages(num_bytes, is_exact=True).tensor.view(dtype)
        else:
            tensor = empty(numel, dtype, HOST_DEVICE)
        return Block(self, numel=numel, dtype=dtype, tensor=tensor)

    def _destroy(self, block: Block, remains: Remains) -> None:
        """Return page-locked memory once no device reads or writes it; the host does not wait."""
        if self._pinned is not None and remains.tensor is not None and block.numel:
            self._pinned.give_back(remains.tensor, remains.arrivals)
        else:
            for arrival in remains.arrivals:
                arrival.synchronize()

    def _release_resources(self) -> None:
        """Unlock what is kept for reuse."""
        if self._pinned is not None:
            self._pinned.close()
