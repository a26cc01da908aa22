"""Read one reduced gradient whole; nothing is changed by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.errors import ShardwiseError, mismatch
from shardwise.runtime.agreement import is_true_anywhere
from shardwise.runtime.divergence import explain

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.managed import ManagedParameter


def full_gradient(record: ManagedParameter) -> torch.Tensor | None:
    """Return the reduced gradient of one parameter, whole, in at least float32.

    Raises:
        ShardwiseError: On all ranks, if some rank has a gradient that was not reduced yet.

    Collectives: one all-reduce of a flag, one all-gather of the chunk, and those of
    ``gradient_divisor``.
    """
    engine = record.engine
    with engine.whereabouts.during("full_gradient()"), explain(engine.whereabouts):
        return _gather(engine, record)


def _gather(engine: Engine, record: ManagedParameter) -> torch.Tensor | None:
    """Do what ``full_gradient`` says."""
    if is_true_anywhere(record.has_local_gradient, engine.topology):
        raise ShardwiseError(
            mismatch(
                "full_gradient",
                expected="a gradient that was reduced",
                got="local ones of no_sync, or one that was assigned",
                where=record.name,
                fix="leave no_sync and run a synchronised backward pass first, or let step "
                "reduce them",
            )
        )
    slice_S = record.chunk.own.gradient_S
    if not record.is_held or slice_S is None:
        return None
    whole = record.view_in(engine.gather(record.chunk, slice_S))
    whole = whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True)
    return record.globalise(whole.div_(engine.gradient_divisor()))
