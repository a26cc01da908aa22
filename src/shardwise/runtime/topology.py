"""Which ranks share work: the shard axis and the replicate axis of one sharded model.

It also starts torch.distributed where a launcher set the environment, and reads that environment
nowhere else. It does not communicate beyond that.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigurationError, mismatch
from shardwise.runtime.collectives import is_pairwise

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NUM_MESH_AXES_HYBRID = 2
PARAMETER_STAGE = 3
"""The stage that shards parameters too."""

_num_engines: Counter[str] = Counter()
"""Engines made so far per group: made by all its ranks together, so every rank counts alike."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """One axis of the mesh as this rank sees it; size 1 has no group and never communicates."""

    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    """Sends small CPU tensors, in an order of its own: the same group, or one made beside it."""
    gathers: dist.ProcessGroup | None = None
    """Gathers parameters beside reductions, where one group runs one collective after the other."""
    lane: int = 0
    """Sets the messages of one engine apart from those of others on the same group."""
    rank: int = 0
    size: int = 1

    @property
    def peers(self) -> list[int]:
        """Ranks of the other members, in rank order."""
        return [rank for rank in range(self.size) if rank != self.rank]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """Shard inside ``shard``, replicate across ``replicate``."""

    shard: Axis
    replicate: Axis
    device: torch.device
    model: tuple[Axis, ...] = ()
    """Axes that the model itself is parallel over: other ranks hold other parts of parameters."""

    @property
    def size(self) -> int:
        """Number of ranks that train together."""
        return self.shard.size * self.replicate.size

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Both axes, the shard axis first."""
        return self.shard, self.replicate


def launch(device: torch.device) -> None:
    """Start torch.distributed when torchrun (or an equal environment) launched this process."""
    launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if dist.is_initialized() or not launched:
        return
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if restart == "0" or not is_one_node:
        dist.init_process_group(backend)
        return
    # torchrun's store outlives a restart with the addresses of the ranks that died in it
    # (pytorch issue 135712), so each restart looks under names of its own. The number is the same
    # on one node alone.
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    own = dist.PrefixStore(f"shardwise/restart-{restart}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size)


def ranks_on_this_node() -> int:
    """Return how many ranks share this machine; all of them where no launcher has said."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def make_topology(
    *,
    stage: int,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    shard_size: int | None = None,
) -> Topology:
    """Return the axes for a stage: stage 0 replicates over all ranks of the mesh, the others shard.

    Collectives: creates process groups when ``shard_size`` asks for a 2-D mesh (all ranks).

    Raises:
        ConfigurationError: The stage, the mesh or the shard size cannot work.
    """
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ConfigurationError(
            mismatch(
                "stage",
                expected="0 (replicate), 1 (shard optimizer state), 2 (also gradients) or 3 (also "
                "parameters)",
                got=repr(stage),
                fix="pass one of these",
            )
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigurationError(
            mismatch(
                "mesh",
                expected="a torch DeviceMesh or None",
                got=type(mesh).__name__,
                fix="build one with init_device_mesh or DeviceMesh.from_group",
            )
        )
    if mesh is not None and shard_size is not None:
        raise ConfigurationError(
            mismatch(
                "mesh and shard_size",
                expected="at most one of them",
                got="both",
                fix="drop shard_size: the mesh already says it",
            )
        )
    if mesh is not None:
        topology = _from_mesh(mesh, stage, device)
    else:
        launch(device)
        size = dist.get_world_size() if dist.is_initialized() else 1
        if shard_size is not None:
            topology = _from_shard_size(shard_size, size, stage, device)
        else:
            everyone = _axis_of(dist.group.WORLD) if dist.is_initialized() else Axis()
            topology = _with_all(everyone, stage, device)
    shard = _equip(topology.shard, device)
    if stage == PARAMETER_STAGE:
        shard = _with_gathers(shard, device)
    return replace(topology, shard=shard, replicate=_equip(topology.replicate, device))


def model_axes(parameters: Iterable[torch.Tensor]) -> dict[str, Axis]:
    """Return the axes that DTensors among some parameters are placed on, by group name."""
    axes: dict[str, Axis] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for number in range(mesh.ndim):
                axis = _axis_of(mesh.get_group(number))
                if axis.group is not None and axis.group.group_name not in axes:
                    axes[axis.group.group_name] = _equip(axis, parameter.device)
    return axes


def is_counted(parameter: torch.Tensor, axes: Mapping[str, Axis]) -> bool:
    """Return whether this rank counts a parameter: its own part, or as the first with a copy."""
    sharded: set[str] = set()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        sharded = {
            mesh.get_group(number).group_name
            for number, placement in enumerate(parameter.placements)
            if placement.is_shard()
        }
    return all(axis.rank == 0 for name, axis in axes.items() if name not in sharded)


def _equip(axis: Axis, device: torch.device) -> Axis:
    """Give an axis a lane of its own, and a control group where its backend has no CPU side.

    Raises:
        ConfigurationError: The group cannot send tensors of the device that holds the parameters.
    """
    if axis.group is None:
        return axis
    served = {served.type for served in axis.group._device_types}
    if device.type not in served:
        raise ConfigurationError(
            mismatch(
                "process group",
                expected=f"a backend for {device.type} tensors",
                got=f"backends for {', '.join(sorted(served)) or 'nothing'}",
                fix="initialise torch.distributed with 'cpu:gloo,cuda:nccl', or move the module",
            )
        )
    control = axis.group
    if "cpu" not in served:
        ranks = dist.get_process_group_ranks(axis.group)
        beside = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert isinstance(beside, dist.ProcessGroup)  # this rank is among them
        control = beside
    _num_engines[axis.group.group_name] += 1
    return replace(axis, control=control, lane=_num_engines[axis.group.group_name])


def _with_gathers(axis: Axis, device: torch.device) -> Axis:
    """Give an axis a second group of the same ranks, if its messages are not told apart by tags."""
    if axis.group is None or is_pairwise(axis, device):
        return axis
    ranks = dist.get_process_group_ranks(axis.group)
    backend = axis.group._get_backend(device).name()
    gathers = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    assert isinstance(gathers, dist.ProcessGroup)  # this rank is among them
    return replace(axis, gathers=gathers)


def _from_shard_size(shard_size: int, size: int, stage: int, device: torch.device) -> Topology:
    """Shard inside runs of ``shard_size`` ranks and replicate across them."""
    if not isinstance(shard_size, int) or shard_size < 1 or size % shard_size:
        raise ConfigurationError(
            mismatch(
                "shard_size",
                expected=f"a divisor of the world size {size}",
                got=repr(shard_size),
                fix="choose the number of ranks that share one copy",
            )
        )
    if stage == 0 and shard_size != 1:
        raise ConfigurationError(
            mismatch(
                "shard_size",
                expected="nothing at stage 0, which replicates",
                got=shard_size,
                fix="choose stage 1 to 3, or drop shard_size",
            )
        )
    if size == 1:
        return Topology(shard=Axis(), replicate=Axis(), device=device)
    mesh = init_device_mesh(
        device.type,
        (size // shard_size, shard_size),
        mesh_dim_names=("replicate", "shard"),
    )
    return _from_mesh(mesh, 1, device)


def _from_mesh(mesh: DeviceMesh, stage: int, device: torch.device) -> Topology:
    """Read the axes of a 1-D mesh, or of a 2-D mesh named (replicate, shard)."""
    if mesh.get_coordinate() is None:
        raise ConfigurationError(
            mismatch(
                "mesh",
                expected="this rank among its ranks",
                got=f"ranks {mesh.mesh.flatten().tolist()}",
                fix="call shard only on the ranks of the mesh, each with its own mesh",
            )
        )
    if mesh.device_type != device.type:
        raise ConfigurationError(
            mismatch(
                "mesh device type",
                expected=device.type,
                got=mesh.device_type,
                fix="build the mesh for the device that holds the parameters",
            )
        )
    if mesh.ndim == 1:
        return _with_all(_axis_of(mesh.get_group()), stage, device)
    if mesh.ndim != NUM_MESH_AXES_HYBRID or stage == 0:
        raise ConfigurationError(
            mismatch(
                "mesh",
                expected="1-D at stage 0, else 1-D or 2-D (replicate, shard)",
                got=f"{mesh.ndim}-D at stage {stage}",
                fix="pass a slice of the mesh such as mesh['dp']",
            )
        )
    return Topology(
        replicate=_axis_of(mesh.get_group(0)), shard=_axis_of(mesh.get_group(1)), device=device
    )


def _with_all(axis: Axis, stage: int, device: torch.device) -> Topology:
    """Put every rank on the one axis that the stage uses."""
    if stage == 0:
        return Topology(shard=Axis(), replicate=axis, device=device)
    return Topology(shard=axis, replicate=Axis(), device=device)


def _axis_of(group: dist.ProcessGroup | None) -> Axis:
    """Describe a process group; a group of one never communicates."""
    size = dist.get_world_size(group)
    if size == 1:
        return Axis()
    return Axis(group=group, rank=dist.get_rank(group), size=size)
