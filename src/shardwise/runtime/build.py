"""Check parameters, pack them into chunks and give every rank the first rank's values.

One chunk at a time: the original storage of a parameter is free as soon as its chunk is packed.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.errors import BudgetError, ConfigurationError, mismatch
from shardwise.layout import ChunkLayout, Item, choose_capacity, pack
from shardwise.options import FLOATING_DTYPES, HALF_DTYPES, MixedPrecision
from shardwise.runtime.agreement import fingerprints_agree
from shardwise.runtime.chunk import Chunk
from shardwise.runtime.collectives import broadcast_from_first, slice_of
from shardwise.runtime.homes import ChunkShape
from shardwise.runtime.managed import ManagedParameter, local_part, record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.runtime.homes import Homes
    from shardwise.runtime.offload import Offload
    from shardwise.runtime.topology import Topology

ALIGNMENT_BYTES = 64
"""Slots start where torch's own allocations would: kernels then take the same path, to the bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPolicy:
    """What packing depends on besides the parameters."""

    precision: MixedPrecision | None
    """Dtypes and master weights; None keeps every parameter's dtype and makes no masters."""
    keep_dtype: frozenset[nn.Parameter] = frozenset()
    """Parameters that ``param_dtype`` does not apply to."""
    chunk_bytes: int | None = None
    """Capacity of a chunk; None searches for the least waste."""
    keeps_slices: bool = False
    """Release every chunk as soon as it is packed (stage 3)."""
    bundles: Mapping[nn.Parameter, int] = field(default_factory=dict)
    """Parameters that are gathered together, by the number of their bundle."""
    offload: Offload | None = None
    """Gives slices homes off the accelerator; None leaves all there."""

    def is_sliced(self, topology: Topology) -> bool:
        """Return whether whole parameters come and go; alone, only if they lie elsewhere."""
        is_elsewhere = self.offload is not None and self.offload.rests_parameters
        return self.keeps_slices and (topology.shard.size > 1 or is_elsewhere)


@dataclass(frozen=True, slots=True)
class _Family:
    """Parameters that may share a chunk."""

    bundle: int | None

    source_dtype: torch.dtype
    param_dtype: torch.dtype
    is_trainable: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """One chunk before its values are there."""

    family: _Family
    layout: ChunkLayout
    first: int
    """Index of its first parameter: chunks are numbered in this order."""


def read_parameter(record: ManagedParameter) -> torch.Tensor:
    """Return the value that a parameter has."""
    return record.values.detach()


def check_parameters(
    named: Sequence[tuple[str, nn.Parameter]], *, meta_as: torch.device | None = None
) -> torch.device:
    """Return the one device of all parameters, or refuse them before anything is changed.

    Args:
        named: The parameters with their names.
        meta_as: Device that parameters on the meta device will get values on; None refuses them.

    Raises:
        ConfigurationError: A parameter is managed already, has no values, lies on another
            device, shares memory with another, or has a kind of storage that cannot be packed.
    """
    devices = {meta_as if p.is_meta and meta_as else p.device for _, p in named}
    if len(devices) > 1:
        places = {str(p.device): name for name, p in reversed(named)}
        raise _refusal("parameters", "one device", f"{places}", "move the module to one device")
    for name, parameter in named:
        _check_parameter(name, parameter, may_be_meta=meta_as is not None)
    _check_overlap([(name, p) for name, p in named if not p.is_meta])
    return next(iter(devices), torch.device("cpu"))


def _check_parameter(name: str, parameter: nn.Parameter, *, may_be_meta: bool) -> None:
    """Refuse one parameter that cannot be packed."""
    if record_of(parameter) is not None:
        raise _refusal(
            f"parameter {name!r}", "one that is not sharded yet", "a sharded one", "shard it once"
        )
    if nn.parameter.is_lazy(parameter):
        raise _refusal(
            f"parameter {name!r}", "known shape", "a lazy parameter", "run one forward pass first"
        )
    if parameter.is_meta and not may_be_meta:
        raise _refusal(
            f"parameter {name!r}",
            "values",
            "a meta tensor",
            "call shardwise.shard on the module, or materialise it with to_empty() first",
        )
    if parameter.layout is not torch.strided or parameter.is_quantized:
        raise _refusal(
            f"parameter {name!r}", "a dense tensor", f"{parameter.layout}", "convert it to dense"
        )
    if parameter.requires_grad and parameter.dtype not in FLOATING_DTYPES:
        raise _refusal(
            f"parameter {name!r}",
            "float16, bfloat16, float32 or float64",
            f"{parameter.dtype}",
            "hold complex parameters as view_as_real, and pass others as ignored",
        )


def _check_overlap(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse two parameter objects over the same memory: packing would cut that tie."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in named:
        if parameter.numel():
            values = local_part(parameter)
            last = sum((n - 1) * s for n, s in zip(values.shape, values.stride(), strict=True))
            start = values.storage_offset()
            storage = values.untyped_storage()._cdata
            spans.setdefault(storage, []).append((int(start), int(start + last), name))
    for members in spans.values():
        members.sort()
        for (_, stop, one), (start, _, other) in pairwise(members):
            if start <= stop:
                raise _refusal(
                    f"parameters {one!r} and {other!r}",
                    "memory of their own",
                    "two parameters over the same memory",
                    "tie them by using one nn.Parameter object in both places",
                )


def check_same_on_all_ranks(
    named: Sequence[tuple[str, nn.Parameter]], settings: Sequence[object], topology: Topology
) -> None:
    """Raise on every rank when ranks disagree about the parameters or the settings.

    Collectives: one all-reduce of two numbers per axis.
    """
    described = [
        (name, tuple(p.shape), p.stride(), str(p.dtype), p.requires_grad) for name, p in named
    ]
    text = repr((described, *settings)).encode()
    fingerprint = zlib.crc32(text) << 32 | zlib.adler32(text)
    if topology.size > 1 and not fingerprints_agree(fingerprint, topology):
        raise ConfigurationError(
            mismatch(
                "model and settings",
                expected="the same names, shapes, dtypes, trainability and options on every rank",
                got=f"{len(named)} parameters, or options, that differ from another rank's",
                fix="build the same model with the same options on all ranks",
            )
        )


def build_chunks(
    records: Sequence[ManagedParameter],
    topology: Topology,
    policy: PackingPolicy,
    atoms: dict[ManagedParameter, int],
    *,
    read: Callable[[ManagedParameter], torch.Tensor],
    is_repacking: bool = False,
) -> list[Chunk]:
    """Pack all records and return their chunks in order of first use.

    Collectives: one broadcast per chunk and axis, and those of ``read``.

    Args:
        records: Every parameter, in order of use; bound to its place on return.
        topology: The ranks that share the chunks.
        policy: Dtypes, masters and capacity.
        atoms: Elements of a parameter that stay together, where it is not 1.
        read: Returns the whole value of a record.
        is_repacking: Values are read from earlier chunks, which must last until all are packed.
    """
    atoms_before = {record: record.atom_numel for record in records}
    for record in records:
        record.atom_numel = atoms.get(record, 1)
    families: dict[_Family, list[ManagedParameter]] = {}
    for record in records:
        families.setdefault(_family_of(record, policy), []).append(record)
    plans = [
        _Plan(family, layout, min(slot.index for slot in layout.slots))
        for family, members in families.items()
        for layout in _layouts(family, members, topology, policy)
    ]
    plans.sort(key=lambda plan: plan.first)
    shapes = [_shape_of(plan, policy, topology) for plan in plans]
    try:
        homes = None if policy.offload is None else policy.offload.choose(shapes, topology)
    except BudgetError:
        for record, numel in atoms_before.items():
            record.atom_numel = numel
        raise
    by_index = {record.index: record for record in records}
    packed: list[tuple[Chunk, list[ManagedParameter]]] = []
    for index, (plan, shape) in enumerate(zip(plans, shapes, strict=True)):
        family, layout = plan.family, plan.layout
        parts = [by_index[slot.index] for slot in layout.slots]
        source_C = torch.zeros(layout.numel, dtype=family.source_dtype, device=topology.device)
        for slot, part in zip(layout.slots, parts, strict=True):
            source_C.as_strided(part.shape, part.stride, slot.start).copy_(read(part))
        broadcast_from_first(source_C, topology)
        chunk = _chunk_from(source_C, plan, shape, topology)
        chunk.index = index
        chunk.bundle = shape.bundle
        packed.append((chunk, parts))
        if not is_repacking:
            _settle(chunk, parts, shape, topology, homes)
    if is_repacking:
        for (chunk, parts), shape in zip(packed, shapes, strict=True):
            _settle(chunk, parts, shape, topology, homes)
    return [chunk for chunk, _ in packed]


def _settle(
    chunk: Chunk,
    parts: Sequence[ManagedParameter],
    shape: ChunkShape,
    topology: Topology,
    homes: Homes | None,
) -> None:
    """Give records their place in a chunk, and its slices their homes; release it at stage 3."""
    chunk.bind(parts, topology.shard.rank)
    if homes is not None:
        chunk.own.rest_state(
            homes.state_of(chunk.index),
            is_trainable=shape.is_trainable,
            is_beside_working=homes.plan.is_together(chunk.index),
        )
    if shape.is_sliced:
        chunk.shed(None if homes is None else homes.working_of(chunk.index))


def _shape_of(plan: _Plan, policy: PackingPolicy, topology: Topology) -> ChunkShape:
    """Return what the homes of a chunk's slices depend on."""
    precision, family = policy.precision, plan.family
    is_half = family.param_dtype in HALF_DTYPES
    return ChunkShape(
        slice_numel=plan.layout.slice_numel,
        whole_numel=plan.layout.numel,
        param_dtype=family.param_dtype,
        reduce_dtype=(precision and precision.reduce_dtype) or family.param_dtype,
        has_master=is_half and precision is not None and precision.master_weights,
        is_trainable=family.is_trainable,
        is_sliced=policy.is_sliced(topology),
        bundle=-1 - plan.first if family.bundle is None else family.bundle,
    )


def _layouts(
    family: _Family,
    members: Sequence[ManagedParameter],
    topology: Topology,
    policy: PackingPolicy,
) -> list[ChunkLayout]:
    """Choose the chunks of one family."""
    itemsize = family.param_dtype.itemsize
    alignment = ALIGNMENT_BYTES // itemsize
    numels = [member.shape.numel() for member in members]
    if policy.chunk_bytes is not None:
        capacity = max(1, policy.chunk_bytes // itemsize)
    elif family.bundle is not None:
        capacity = sum(numels) + sum(math.lcm(alignment, m.atom_numel) for m in members)
    else:
        capacity = choose_capacity(numels, itemsize=itemsize)
    return pack(
        [
            Item(index=m.index, numel=numel, atom_numel=m.atom_numel)
            for m, numel in zip(members, numels, strict=True)
        ],
        shard_size=topology.shard.size,
        capacity_numel=capacity,
        alignment_numel=alignment,
        slice_multiple=topology.replicate.size,
    )


def _family_of(record: ManagedParameter, policy: PackingPolicy) -> _Family:
    """Return which chunks a parameter may lie in."""
    parameter = record.parameter
    wanted = policy.precision.param_dtype if policy.precision is not None else None
    if wanted is None or parameter in policy.keep_dtype or not parameter.is_floating_point():
        wanted = parameter.dtype
    bundle = policy.bundles.get(parameter)
    return _Family(bundle, parameter.dtype, wanted, parameter.requires_grad)


def _chunk_from(
    source_C: torch.Tensor, plan: _Plan, shape: ChunkShape, topology: Topology
) -> Chunk:
    """Cut the master from the values before rounding, then round them."""
    axis = topology.shard
    master_S = None
    if shape.has_master and shape.is_trainable:
        master_S = slice_of(source_C, axis.rank, axis.size).to(torch.float32, copy=True)
    return Chunk(
        plan.layout,
        parameters_C=source_C.to(shape.param_dtype),
        master_S=master_S,
        reduce_dtype=shape.reduce_dtype,
        keeps_masters=shape.has_master,
        axis=axis,
    )


def _refusal(what: str, expected: str, got: str, fix: str) -> ConfigurationError:
    """Return the error for an unfit parameter."""
    return ConfigurationError(mismatch(what, expected=expected, got=got, fix=fix))
