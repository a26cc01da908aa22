"""Take one gradient from autograd: into its chunk's buffer, or aside under no_sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.runtime.absent import describing
from shardwise.runtime.meter import Holding
from shardwise.runtime.placeholder import ShardedGradient

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.runtime.managed import ManagedParameter
    from shardwise.runtime.reduction import Reduction


class GradientIntake:
    """Moves gradients out of ``parameter.grad``."""

    def __init__(self, reduction: Reduction, *, leaves_stand_ins: bool) -> None:
        """Fill the buffers of a reduction."""
        self._reduction = reduction
        self._leaves_stand_ins = leaves_stand_ins

    def keep_local(self, record: ManagedParameter) -> None:
        """Under no_sync: leave the gradient in place, or sum it in the wider reduce dtype."""
        grad = record.parameter.grad
        if grad is not None:
            self._reduction.pool.meter.watch_new(grad, Holding.BUFFERS)
        if grad is None or grad.dtype == record.chunk.reduce_dtype or not self._leaves_stand_ins:
            record.note_accumulated()
            return
        wide = record.localise(grad.to_dense() if grad.is_sparse else grad)
        wide = wide.to(record.chunk.reduce_dtype)
        record.local = wide if record.local is None else record.local.add_(wide)
        self._reduction.pool.meter.watch_new(record.local, Holding.BUFFERS)
        self.show_stand_in(record)

    @torch.no_grad()
    def adopt(self, record: ManagedParameter) -> None:
        """Let a gradient that the user has assigned replace all that came before it.

        Made one of this rank's: it is a true gradient, theirs are scaled and weighted.
        """
        record.local = None
        if record.is_held:
            record.drop_gradient()
            record.is_replaced = True
        grad, factor = record.parameter.grad, record.engine.local_factor
        if grad is not None and factor != 1.0:
            record.parameter.grad = grad * factor
        record.note_accumulated()

    @describing
    def drop(self, records: Iterable[ManagedParameter]) -> None:
        """Forget gradients that some rank has removed, or assigned others over."""
        for record in records:
            record.drop_gradient()
            record.parameter.grad = None

    def absorb(self, record: ManagedParameter) -> None:
        """Move ``parameter.grad`` (and what no_sync kept) into the chunk's buffer."""
        grad = record.parameter.grad
        self.show_stand_in(record)
        if isinstance(grad, ShardedGradient):
            grad = None
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        grad = None if grad is None else record.localise(grad)
        parts = [part for part in (grad, record.local) if part is not None]
        record.local = None
        chunk = record.chunk
        for part in parts:
            self._reduction.pool.meter.watch_new(part, Holding.BUFFERS)
            if chunk.is_sent:
                record.late = part.clone() if record.late is None else record.late.add_(part)
                continue
            slot = record.view_in(self._reduction.buffer(chunk))
            if record.has_arrived:
                slot.add_(part)
                continue
            slot.copy_(part)
            record.has_arrived = True
            chunk.num_missing -= record.is_expected

    def show_stand_in(self, record: ManagedParameter) -> None:
        """Let ``parameter.grad`` say that a gradient exists elsewhere."""
        record.parameter.grad = record.handle if self._leaves_stand_ins else None
