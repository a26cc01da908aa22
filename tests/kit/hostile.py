"""Tiers that are as hostile as their protocol allows, so that a mistake is a wrong number.

A copy lands when it is waited for and no earlier; whatever is undefined - fresh memory, the target
of a copy under way, freed memory - holds poison: NaN, or for integers the byte 0x7f throughout.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ShardwiseError
from shardwise.tiers import (
    Block,
    Copier,
    DiskOptions,
    DiskTier,
    Lane,
    Tier,
    Tiers,
    Transfer,
)
from shardwise.tiers.memory import HOST_DEVICE, empty, fill_memory, open_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.tiers.block import Remains
    from shardwise.tiers.tier import OpenPieces, Pieces

_POISON_BYTE = 0x7F


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or for dtypes without NaN with bytes that are no likely number."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.view(torch.uint8).fill_(_POISON_BYTE)


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether every element is poison."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor.view(torch.uint8) == _POISON_BYTE).all())


class HostileTier(Tier):
    """Ordinary memory that never holds a right number by luck."""

    def __init__(self, name: str = "accelerator", *, budget_bytes: int | None = None) -> None:
        """Hold nothing yet, in place of the tier called ``name``."""
        super().__init__(name, budget_bytes=budget_bytes, lane=Lane.MEMORY)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return HOST_DEVICE

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
        tensor = empty(numel, dtype, HOST_DEVICE)
        poison(tensor)
        return Block(self, numel=numel, dtype=dtype, tensor=tensor)

    def _destroy(self, block: Block, remains: Remains) -> None:
        if remains.tensor is not None:
            poison(remains.tensor)

    def _release_resources(self) -> None:
        pass


class LateScheduler:
    """Runs a copy when it is waited for, or when one that is waited for depends on it.

    Of what has to run then, any order that the dependencies allow is as likely as another. With an
    ``early_share`` above 0 each other copy may land at that moment too, with that probability.
    """

    def __init__(self, *, seed: int = 0, early_share: float = 0.0) -> None:
        """Choose by ``seed``."""
        self._random = random.Random(seed)
        self._early_share = early_share
        self._lock = threading.RLock()
        self._pending: dict[Transfer, list[Transfer]] = {}
        self._is_closed = False

    def submit(self, transfer: Transfer, after: Sequence[Transfer]) -> None:
        """Keep the copy for later, and spoil its target unless an earlier copy still needs it."""
        with self._lock:
            if self._is_closed:
                raise ShardwiseError(f"{transfer!r} after close()")
            self._pending[transfer] = [one for one in after if one in self._pending]
            target = transfer.target
            is_needed = any(target in (one.source, one.target) for one in self._pending[transfer])
            if target.tier.lane is Lane.MEMORY and not is_needed:
                poison(target.tensor)

    def finish(self, transfer: Transfer) -> None:
        """Run the copy and what it depends on, and maybe others."""
        with self._lock:
            chosen = {one for one in self._pending if self._random.random() < self._early_share}
            self._run({transfer} | chosen)

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Run what is left."""
        with self._lock:
            self._is_closed = True
            self._run(set(self._pending))
        if then is not None:
            then()

    def _run(self, wanted: set[Transfer]) -> None:
        """Run copies and all they depend on, in a random order that respects the dependencies."""
        due, unseen = set(), [one for one in wanted if one in self._pending]
        while unseen:
            transfer = unseen.pop()
            if transfer not in due:
                due.add(transfer)
                unseen += [one for one in self._pending[transfer] if one in self._pending]
        while due:
            ready = [one for one in self._pending if one in due and self._is_ready(one)]
            transfer = self._random.choice(ready)
            transfer.run()
            due.discard(transfer)
            del self._pending[transfer]

    def _is_ready(self, transfer: Transfer) -> bool:
        """Whether nothing that the copy depends on is left."""
        return not any(one in self._pending for one in self._pending[transfer])


def open_hostile_tiers(
    *,
    seed: int = 0,
    early_share: float = 0.0,
    accelerator_budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    disk_budget_bytes: int | None = None,
    disk: DiskOptions | None = None,
) -> Tiers:
    """Open tiers as ``shardwise.tiers.open_tiers`` does on the CPU, but hostile."""
    return Tiers(
        HostileTier(budget_bytes=accelerator_budget_bytes),
        HostileTier("host", budget_bytes=host_budget_bytes),
        None if disk is None else DiskTier(disk, budget_bytes=disk_budget_bytes),
        copier=Copier(LateScheduler(seed=seed, early_share=early_share)),
    )
