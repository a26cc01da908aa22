"""All tiers of one process, and the copies between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.tiers.copier import Copier
from shardwise.tiers.disk import DiskTier
from shardwise.tiers.memory import AcceleratorTier, HostTier
from shardwise.tiers.pinned import CudaRegistrar, PinnedMemory
from shardwise.tiers.streams import Streams
from shardwise.tiers.workers import WorkerScheduler

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from shardwise.tiers.block import Block
    from shardwise.tiers.disk import DiskOptions
    from shardwise.tiers.tier import Tier
    from shardwise.tiers.transfer import Transfer


class Tiers:
    """The places where one process keeps bytes.

    A context manager; ``close`` ends copies, frees every block and removes the file.
    """

    def __init__(self, accelerator: Tier, host: Tier, disk: Tier | None, *, copier: Copier) -> None:
        """Own the tiers; ``disk`` is None where none was asked for."""
        self.accelerator = accelerator
        self.host = host
        self.disk = disk
        self._copier = copier

    def __enter__(self) -> Tiers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def copy(self, source: Block, target: Block) -> Transfer:
        """Start a copy between any two blocks: see ``Copier.copy``."""
        return self._copier.copy(source, target)

    def close(self) -> None:
        """Let copies run out, then close every tier; idempotent.

        It may be called by the collector, even on a thread that is amid a copy: tiers are closed
        when that has ended, later than this returns.
        """
        self._copier.close(self._close_tiers)

    def _close_tiers(self) -> None:
        """Close every tier."""
        for tier in (self.accelerator, self.host, self.disk):
            if tier is not None:
                tier.close()


def open_tiers(
    device: torch.device,
    *,
    accelerator_budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    disk_budget_bytes: int | None = None,
    disk: DiskOptions | None = None,
) -> Tiers:
    """Open the tiers of one process.

    Args:
        device: Where forward runs; on "cpu" the accelerator tier is ordinary memory.
        accelerator_budget_bytes: None for what the device has.
        host_budget_bytes: None for what the host has.
        disk_budget_bytes: None for what the file system has.
        disk: Where the disk tier's file lies; None for no disk tier.

    Returns:
        Tiers that hold nothing yet. Host memory is page-locked where the device is CUDA.

    Raises:
        ConfigurationError: A budget or the folder cannot work; nothing was opened.

    Example:
        >>> import torch
        >>> with open_tiers(torch.device("cpu")) as tiers:
        ...     source = tiers.host.allocate(3, torch.float32)
        ...     target = tiers.accelerator.allocate(3, torch.float32)
        ...     source.tensor.copy_(torch.arange(3.0))
        ...     transfer = tiers.copy(source, target)
        ...     transfer.wait()
        ...     tiers.host.free(source)
        ...     target.tensor
        tensor([0., 1., 2.])
        tensor([0., 1., 2.])
    """
    pinned = PinnedMemory(CudaRegistrar()) if device.type == "cuda" else None
    streams = None if device.type == "cpu" else Streams(device)
    return Tiers(
        AcceleratorTier(device, budget_bytes=accelerator_budget_bytes),
        HostTier(budget_bytes=host_budget_bytes, pinned=pinned, is_mapped=pinned is None),
        None if disk is None else DiskTier(disk, budget_bytes=disk_budget_bytes),
        copier=Copier(WorkerScheduler(), streams=streams),
    )
