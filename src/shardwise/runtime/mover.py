"""Carries slices between the tiers of one engine; nothing else writes residency.

Reads are started ahead and waited for when their bytes are needed; writes run behind, and are
waited for when the next chunk is written. An error of a write therefore surfaces one chunk later,
at the latest at the end of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.residency import Tier as TierName

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardwise.tiers import Block, Tier, Tiers, Transfer


class Mover:
    """Starts copies and holds the host memory that slices of the disk tier pass through."""

    def __init__(self, tiers: Tiers) -> None:
        """Move between the tiers of one process."""
        self.tiers = tiers
        self._behind: list[tuple[Transfer, Block]] = []

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
        return tier.allocate(numel, dtype)

    def fetch(self, home: Block) -> tuple[Block, Transfer]:
        """Start to read a block on disk into host memory."""
        near = self.tiers.host.allocate(home.numel, home.dtype)
        try:
            return near, self.tiers.copy(home, near)
        except BaseException:
            self.tiers.host.free(near)
            raise

    def write_back(self, pairs: list[tuple[Block, Block]]) -> None:
        """Start to write host blocks to their homes on disk; each is freed when it is written.

        Waits for what an earlier call has started.
        """
        before, self._behind = self._behind, []
        try:
            for near, home in pairs:
                self._behind.append((self.tiers.copy(near, home), near))
        finally:
            _wait(before)

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
        """Wait for all writes.

        Raises:
            Exception: The first error; all others have been waited for too.
        """
        behind, self._behind = self._behind, []
        _wait(behind)


def _wait(writes: Sequence[tuple[Transfer, Block]]) -> None:
    """Wait for writes, free what they read, then raise the first error."""
    errors: list[Exception] = []
    for transfer, near in writes:
        try:
            transfer.wait()
        except Exception as error:
            errors.append(error)
        near.tier.free(near)
    if errors:
        raise errors[0]
