"""One protocol for every place where bytes can lie: allocate, copy through pieces, free, account.

Every tier passes one suite, ``tests/unit/tiers``. A tier does not decide what lies in it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import torch

from shardwise.errors import ConfigurationError, ShardwiseError, mismatch
from shardwise.tiers.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from shardwise.tiers.block import Block, Remains

    Pieces: TypeAlias = Iterable[torch.Tensor]
    """A block's bytes in order: uint8, 1-D, each valid until the next is asked for."""
    OpenPieces: TypeAlias = AbstractContextManager[Pieces]


HOST_DEVICE = torch.device("cpu")


class Lane(Enum):
    """What a copy to or from a tier is limited by, and so which threads do it."""

    MEMORY = "memory"
    FILE = "file"


class Tier(ABC):
    """Holds blocks, and counts their bytes exactly.

    All methods may be called from any thread. What a block counts is ``footprint_bytes``: for
    memory its elements, for what is handed out in pages the pages.
    """

    def __init__(self, name: str, *, budget_bytes: int | None, lane: Lane) -> None:
        """Hold nothing yet.

        Args:
            name: How errors call the tier.
            budget_bytes: Bytes it may hold; None for no limit of its own.
            lane: Which threads copy its bytes.
        """
        self.name = name
        self.lane = lane
        self._ledger = Ledger(name, budget_bytes)
        self._lock = threading.Lock()
        self._blocks: set[Block] = set()

    @property
    def budget_bytes(self) -> int | None:
        """Bytes the tier may hold, None for no limit of its own."""
        return self._ledger.budget_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all live blocks."""
        return self._ledger.allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """High-water mark of ``allocated_bytes``."""
        return self._ledger.peak_bytes

    def reset_peak(self) -> None:
        """Let the high-water mark fall to ``allocated_bytes``."""
        self._ledger.reset_peak()

    def allocate(self, numel: int, dtype: torch.dtype) -> Block:
        """Return a new block; its elements are uninitialised.

        Args:
            numel: Number of elements, 0 allowed.
            dtype: Any dtype of torch.

        Raises:
            BudgetError: It does not fit; nothing was changed.
            ShardwiseError: The tier is closed.
        """
        if numel < 0:
            raise ConfigurationError(
                mismatch(
                    "numel of a block",
                    expected="at least 0",
                    got=numel,
                    where=f"{self.name} tier",
                    fix="pass the number of elements",
                )
            )
        need_bytes = self.footprint_bytes(numel, dtype)
        what = f"{str(dtype).removeprefix('torch.')}[{numel}]"
        with self._ledger.reservation(need_bytes, what):
            block = self._create(numel, dtype)
            with self._lock:
                self._blocks.add(block)
        return block

    def free(self, block: Block) -> None:
        """Give a block back.

        Raises:
            ShardwiseError: The block is of another tier, was freed before, or a copy from or to it
                was not waited for. It stays as it was.
        """
        if block.tier is not self:
            raise ShardwiseError(
                mismatch(
                    f"free in the {self.name} tier",
                    expected="one of its own blocks",
                    got=repr(block),
                    fix="free it with block.tier.free(block)",
                )
            )
        self._end(block, block.retire())

    def close(self) -> None:
        """Let copies under way run out, free every block, and refuse what comes after; idempotent.

        Errors of copies stay with their handles: ``Transfer.wait`` still raises them.
        """
        if not self._ledger.close():
            return
        with self._lock:
            blocks = list(self._blocks)
        for block in blocks:
            for transfer in block.unwaited():
                transfer.settle()
            if not block.is_freed:
                self._end(block, block.retire(is_forced=True))
        self._release_resources()

    def _end(self, block: Block, remains: Remains) -> None:
        """Return the bytes of a retired block, then count them as free."""
        with self._lock:
            self._blocks.discard(block)
        try:
            self._destroy(block, remains)
        finally:
            self._ledger.release(self.footprint_bytes(block.numel, block.dtype))

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the blocks' tensors lie; the CPU for tiers whose bytes go through the host."""

    @abstractmethod
    def footprint_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return what a block of that size counts towards the budget."""

    @abstractmethod
    def open_pieces(self, block: Block, place: torch.Tensor | None = None) -> OpenPieces:
        """Read a block's bytes, in order; runs on the thread that copies.

        Args:
            block: One of the tier's own.
            place: Memory on the host, uint8, that they are meant for: pieces may be parts of it.
        """

    @abstractmethod
    def write_pieces(self, block: Block, pieces: Pieces) -> None:
        """Fill a block with exactly its bytes; runs on the thread that copies."""

    @abstractmethod
    def _create(self, numel: int, dtype: torch.dtype) -> Block:
        """Make a block for bytes that are within the budget."""

    @abstractmethod
    def _destroy(self, block: Block, remains: Remains) -> None:
        """Take the bytes of a retired block back."""

    @abstractmethod
    def _release_resources(self) -> None:
        """Let go of everything at close; no block is left."""
