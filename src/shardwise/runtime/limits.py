"""What this rank's devices have, and the limits that all ranks keep."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardwise.residency import Limits, resolve_limits
from shardwise.runtime.collectives import all_reduce_scalars
from shardwise.runtime.dry import is_dry_run
from shardwise.runtime.topology import ranks_on_this_node

if TYPE_CHECKING:
    from shardwise.options import Budget
    from shardwise.runtime.topology import Topology

_NO_LIMIT = 2**62


def own_limits(budget: Budget, device: torch.device) -> Limits:
    """Return the limits that a budget sets on this rank; shares are of what it has.

    Host memory and disk are those of the node, divided among its ranks.

    Raises:
        ConfigurationError: A share of an accelerator that there is not.
    """
    num_ranks = ranks_on_this_node()
    accelerator_bytes = None
    if device.type != "cpu":
        accelerator_bytes = torch.accelerator.get_memory_info(device)[1]
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
    disk_bytes = None
    if budget.disk_path is not None and Path(budget.disk_path).is_dir():
        disk_bytes = shutil.disk_usage(budget.disk_path).free // num_ranks
    return resolve_limits(
        budget,
        accelerator_bytes=accelerator_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


def agree_on_limits(own: Limits, topology: Topology) -> Limits:
    """Return the least limits over the ranks. Collectives: one all-reduce per axis."""
    sizes = (own.accelerator_bytes, own.host_bytes, own.disk_bytes)
    accelerator, host, disk = (
        None if size == _NO_LIMIT else size
        for size in least([_NO_LIMIT if size is None else size for size in sizes], topology)
    )
    return Limits(accelerator_bytes=accelerator, host_bytes=host, disk_bytes=disk)


def least(numbers: list[int], topology: Topology) -> list[int]:
    """Return the least of each number over the ranks. Collectives: one all-reduce per axis."""
    return [-number for number in most([-number for number in numbers], topology)]


def most(numbers: list[int], topology: Topology) -> list[int]:
    """Return the most of each number over the ranks. Collectives: one all-reduce per axis."""
    if topology.size == 1 or is_dry_run():
        return numbers
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return all_reduce_scalars(tensor, topology.axes, maximum=True).tolist()
