"""Bytes in heterogeneous memory: accelerator, host and disk, allocated, copied and counted.

A tier hands out *blocks*, flat runs of elements of one dtype. A copy between any two blocks is
started, and waited for later::

    with open_tiers(device, host_budget_bytes=budget) as tiers:
        block = tiers.accelerator.allocate(numel, dtype)
        transfer = tiers.copy(block_on_host, block)      # returns at once
        ...                                              # compute
        transfer.wait()                                  # block.tensor may be used from here on
        tiers.host.free(block_on_host)

What lies where, and when it moves, is decided elsewhere. Which file to open for what:

- ``tier``, ``ledger``: the protocol, its accounting, what a budget refuses.
- ``block``: who still needs a block's bytes; use after free.
- ``memory``, ``pinned``: accelerator and host; page-locked memory of exact size.
- ``disk``: blocks in a file, checksums. Under it ``disk_file`` (whole reads and writes, past the
  page cache), ``slots`` (which parts are free), ``file_calls`` (the system calls), ``pages``
  (aligned buffers).
- ``copier``, ``transfer``: the order of copies, and the handle that is waited for.
- ``workers``, ``streams``: who carries copies out: threads, or a device's side streams.
- ``factory``: all of it put together.

Every tier passes one suite, in which one is hostile: its copies land as late as they may, and what
is undefined holds NaN.
"""

from shardwise.tiers.block import Block
from shardwise.tiers.copier import Copier
from shardwise.tiers.disk import CorruptedBlockError, DiskOptions, DiskTier
from shardwise.tiers.factory import Tiers, open_tiers
from shardwise.tiers.memory import AcceleratorTier, HostTier
from shardwise.tiers.tier import Lane, Tier
from shardwise.tiers.transfer import Scheduler, Transfer
from shardwise.tiers.workers import WorkerScheduler

__all__ = [
    "AcceleratorTier",
    "Block",
    "Copier",
    "CorruptedBlockError",
    "DiskOptions",
    "DiskTier",
    "HostTier",
    "Lane",
    "Scheduler",
    "Tier",
    "Tiers",
    "Transfer",
    "WorkerScheduler",
    "open_tiers",
]
