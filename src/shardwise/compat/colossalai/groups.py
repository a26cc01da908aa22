"""Turn a process group, and how many copies to keep in it, into a device mesh.

Groups are created by their members alone, so that ranks outside may do something else meanwhile.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigurationError, mismatch
from shardwise.runtime.topology import launch


def mesh_of(
    group: dist.ProcessGroup | None, num_replicas: int, device: torch.device
) -> DeviceMesh | None:
    """Return the mesh over a group: 1-D, or (replicate, shard) for several replicas.

    Args:
        group: The ranks that train together; None for all.
        num_replicas: Copies to keep: the group is cut into so many runs of consecutive ranks, each
            run shards, ranks at the same place of their runs replicate.
        device: Where the parameters lie.

    Returns:
        None where the default, all ranks sharding together, is meant.

    Raises:
        ConfigurationError: This rank is not in the group, or its size is no multiple of the copies.

    Collectives: two new groups, each created by its members only, if there are several replicas.
    """
    launch(device)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(
            mismatch(
                "process group",
                expected="one that this rank belongs to",
                got="a group of other ranks",
                fix="build the optimizer on the ranks of its group, each with its own group",
            )
        )
    is_started = dist.is_initialized()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if is_started else [0]
    if not isinstance(num_replicas, int) or num_replicas < 1 or len(ranks) % num_replicas:
        raise ConfigurationError(
            mismatch(
                "sub_dp_size",
                expected=f"a divisor of the group's size {len(ranks)}",
                got=repr(num_replicas),
                fix="choose how many copies of the sharded state to keep",
            )
        )
    if num_replicas == 1:
        return None if group is None else DeviceMesh.from_group(group, device.type)
    grid = torch.tensor(ranks).view(num_replicas, -1)
    place = (grid == dist.get_rank()).nonzero()[0].tolist()
    # every rank creates its row before its column: whoever waits, waits for a rank that comes
    shard = _group_of_members(grid[place[0]])
    replicate = _group_of_members(grid[:, place[1]])
    return DeviceMesh.from_group(
        [replicate, shard], device.type, mesh=grid, mesh_dim_names=("replicate", "shard")
    )


def _group_of_members(ranks: torch.Tensor) -> dist.ProcessGroup:
    """Create a group on its members alone."""
    group = dist.new_group(ranks.tolist(), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
