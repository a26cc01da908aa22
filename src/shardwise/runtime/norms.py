"""The global norm of gradient slices, every logical parameter counted once.

Padding is zero and every element of a parameter has one owner on the shard axis, so a sum over
slices and over that axis is a sum over parameters; slices are equal on all replicas. Where the
model is parallel too, parts are summed over its axes, and copies are counted by the first rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ConfigurationError, mismatch
from shardwise.options import HALF_DTYPES
from shardwise.runtime.collectives import all_reduce_scalars
from shardwise.runtime.dry import is_dry_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwise.runtime.managed import ManagedParameter
    from shardwise.runtime.topology import Topology

_PART_NUMEL = 2**20
"""Elements of 16-bit gradients that are made wide at once."""


def check_norm_type(norm_type: float) -> float:
    """Refuse orders that are not norms."""
    is_number = isinstance(norm_type, int | float) and not isinstance(norm_type, bool)
    order = float(norm_type) if is_number else math.nan
    if not order > 0:
        raise ConfigurationError(
            mismatch("norm_type", expected="a positive number or inf", got=norm_type, fix="use 2.0")
        )
    return order


def held_runs(records: Iterable[ManagedParameter]) -> list[torch.Tensor]:
    """Return the owned pieces of held gradients as few contiguous 1-D views, in storage order."""
    runs: list[torch.Tensor] = []
    by_chunk: dict[int, list[ManagedParameter]] = {}
    for record in records:
        if record.is_held and record.piece is not None:
            by_chunk.setdefault(id(record.chunk), []).append(record)
    for members in by_chunk.values():
        slice_S = members[0].chunk.own.gradient_S
        if slice_S is None:
            continue
        num_owners = sum(record.piece is not None for record in members[0].chunk.records)
        if len(members) == num_owners:
            runs.append(slice_S)
            continue
        runs += [p for p in (record.piece_in(slice_S) for record in members) if p is not None]
    return runs


def global_norm(
    runs: Sequence[torch.Tensor],
    copied: Sequence[torch.Tensor] | None,
    *,
    order: float,
    topology: Topology,
) -> float:
    """Return the norm over all ranks, equal on all of them.

    Args:
        runs: This rank's gradient pieces.
        copied: Whole gradients that every rank has its own copy of; the mean over ranks is counted.
            None, on all ranks alike, where there cannot be any.
        order: The p of the norm, positive or inf.
        topology: The ranks.

    Returns:
        The norm as stored (not unscaled); inf or nan only if an element is; 1 in a dry run.

    Collectives: one all-reduce of one number per axis, the model's too; a second where the first
    overflows.
    """
    if is_dry_run():
        return 1.0

    def measure(p: float, dtype: torch.dtype, divisor: float) -> float:
        owned = [_norm(run, p, dtype, divisor) for run in runs]
        copies = None if copied is None else [_norm(grad, p, dtype, divisor) for grad in copied]
        return _reduce(owned, copies, p, topology)

    total = measure(order, torch.float32, 1.0)
    if math.isfinite(total):
        return total
    # powers may have overflowed where no element has: again in float64, scaled by the largest
    largest = measure(math.inf, torch.float32, 1.0)
    if not math.isfinite(largest) or largest == 0:
        return largest
    return measure(order, torch.float64, largest) * largest


def _norm(values: torch.Tensor, order: float, dtype: torch.dtype, divisor: float) -> torch.Tensor:
    """Return the norm of one tensor, divided first, as a 0-dim float64 tensor; 0 if empty."""
    if values.numel() == 0:
        return values.new_zeros((), dtype=torch.float64)
    # a wide copy is made of what is narrow or divided: parts of it stay in the cache
    is_copied = divisor != 1.0 or values.dtype in HALF_DTYPES
    parts = values.flatten().split(_PART_NUMEL) if is_copied else (values,)
    norms: list[torch.Tensor] = []
    for part in parts:
        divided = part if divisor == 1.0 else part.to(dtype) / divisor
        wide = dtype if divided.dtype in HALF_DTYPES else divided.dtype
        norms.append(torch.linalg.vector_norm(divided, order, dtype=wide).double())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)


def _reduce(
    owned: Sequence[torch.Tensor],
    copied: Sequence[torch.Tensor] | None,
    order: float,
    topology: Topology,
) -> float:
    """Combine norms of parts, over this rank and the others."""
    axes = ((topology.shard,) if copied is None else topology.axes) + topology.model
    zero = torch.zeros((), dtype=torch.float64, device=topology.device)
    own = torch.stack([zero, *(part.to(zero.device) for part in owned)])
    copies = torch.stack([zero, *(part.to(zero.device) for part in copied or ())])
    if math.isinf(order):
        value = torch.maximum(own.max(), copies.max()).reshape(1)
        return float(all_reduce_scalars(value, axes, maximum=True))
    # slices repeat on every replica, copies on every rank
    replicas = 1 if copied is None else topology.replicate.size
    num_copies = topology.size * math.prod(axis.size for axis in topology.model)
    value = own.pow(order).sum() / replicas + copies.pow(order).sum() / num_copies
    return float(all_reduce_scalars(value.reshape(1), axes)) ** (1.0 / order)
