"""Carries slices between the tiers of one engine; nothing else writes residency.

Reads are started ahead and waited for when their bytes are needed; writes run behind, and are
waited for when the next chunk is written. An error of a write therefore surfaces one chunk later,
at the latest at the end of the step; what was to be written stays in host memory until then, and
goes back to its owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import BudgetError
from shardwise.residency import Tier as TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from shardwise.tiers import Block, Tier, Tiers, Transfer


class Write(NamedTuple):
    """A slice in host memory that is to be written to its home on disk."""

    near: Block
    home: Block
    take_back: Callable[[Block], None]
    """Called with ``near`` where it could not be written: it holds the only values there are."""


class Mover:
    """Starts copies and holds the host memory that slices of the disk tier pass through.

    Memory that was written from is used for the next reads until ``settle``: fresh memory would
    cost the system more time than the copy.
    """

    def __init__(self, tiers: Tiers) -> None:
        """Move between the tiers of one process."""
        self.tiers = tiers
        self._behind: list[tuple[Transfer, Write]] = []
        self._spare: list[Block] = []

    def tier(self, name: TierName) -> Tier:
        """Return a tier by the name that decisions have for it."""
        match name:
            case TierName.ACCELERATOR:
                return self.tiers.accelerator
            case TierName.HOST:
                return self.tiers.host
            case TierName.DISK:
                assert self.tiers.disk is not None
                return self.tiers.disk

    def name(self, tier: Tier) -> TierName:
        """Return the name that decisions have for a tier."""
        return next(name for name in TierName if self._has(name) and self.tier(name) is tier)

    def _has(self, name: TierName) -> bool:
        """Return whether there is a tier of a name."""
        return name is not TierName.DISK or self.tiers.disk is not None

    def allocate(self, tier: Tier, numel: int, dtype: torch.dtype) -> Block:
        """Return a new block. Raises ``BudgetError`` with nothing changed where it does not fit."""
        try:
            return tier.allocate(numel, dtype)
        except BudgetError:
            if tier is not self.tiers.host or not self._spare:
                raise
            self._drop_spare()
            return tier.allocate(numel, dtype)

    def take_near(self, home: Block) -> Block:
        """Return uninitialised host memory for a block on disk."""
        for position, block in enumerate(self._spare):
            if (block.numel, block.dtype) == (home.numel, home.dtype):
                return self._spare.pop(position)
        self._drop_spare()  # of another size: together they would be more than is needed at once
        return self.tiers.host.allocate(home.numel, home.dtype)

    def fetch(self, home: Block) -> tuple[Block, Transfer]:
        """Start to read a block on disk into host memory."""
        near = self.take_near(home)
        try:
            return near, self.tiers.copy(home, near)
        except BaseException:
            self.tiers.host.free(near)
            raise

    def write_back(self, writes: Sequence[Write]) -> None:
        """Start to write host blocks to their homes on disk, which takes the blocks over.

        Waits for what an earlier call has started.
        """
        before, self._behind = self._behind, []
        num_started = 0
        try:
            for write in writes:
                self._behind.append((self.tiers.copy(write.near, write.home), write))
                num_started += 1
        finally:
            for write in writes[num_started:]:
                write.take_back(write.near)
            self._wait(before)

    def carry(self, pairs: list[tuple[Block, Block]]) -> None:
        """Copy blocks to others and return when all are there.

        Raises:
            Exception: The first error; no copy runs any more.
        """
        transfers: list[Transfer] = []
        errors: list[Exception] = []
        try:
            for source, target in pairs:
                transfers.append(self.tiers.copy(source, target))
        except Exception as error:
            errors.append(error)
        for transfer in transfers:
            try:
                transfer.wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def settle(self) -> None:
        """Wait for all writes and hold no memory.

        Raises:
            Exception: The first error; all others have been waited for too.
        """
        behind, self._behind = self._behind, []
        try:
            self._wait(behind)
        finally:
            self._drop_spare()

    def _wait(self, writes: Sequence[tuple[Transfer, Write]]) -> None:
        """Wait for writes, keep or hand back what they read, then raise the first error."""
        errors: list[Exception] = []
        for transfer, write in writes:
            try:
                transfer.wait()
            except Exception as error:
                errors.append(error)
                write.take_back(write.near)
            else:
                self._spare.append(write.near)
        if errors:
            raise errors[0]

    def _drop_spare(self) -> None:
        """Give memory back that nothing passes through now."""
        spare, self._spare = self._spare, []
        for block in spare:
            block.tier.free(block)
