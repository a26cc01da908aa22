"""Reduce one chunk's gradients into the rank's slice; when that happens is the reducer's matter.

The sum runs in rank order over the shard axis, then over the replicate axis, and is divided once,
before it is rounded to a 16-bit slice. Buffers are reused within a backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.options import HALF_DTYPES
from shardwise.runtime.collectives import ReduceScatter, all_reduce_in_rank_order, is_pairwise
from shardwise.runtime.meter import Holding

if TYPE_CHECKING:
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.pool import BufferPool
    from shardwise.runtime.topology import Topology


class Reduction:
    """Gradient buffers and their reduction."""

    def __init__(
        self, topology: Topology, pool: BufferPool, *, keeps_whole: bool, divisor: int
    ) -> None:
        """Set what is common to all chunks.

        Args:
            topology: The axes to reduce over.
            pool: Where buffers come from and go to.
            keeps_whole: Stage 1: whole gradient buffers stay until ``release``.
            divisor: Every sum is divided by it: the number of ranks, or 1 for sums.
        """
        self._topology = topology
        self._keeps_whole = keeps_whole
        self.divisor = divisor
        self.pool = pool

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        """Return the chunk's whole gradient buffer [C], making one where there is none."""
        buffer_C = chunk.gradients_C
        if buffer_C is None:
            like = torch.empty(0, dtype=chunk.reduce_dtype, device=chunk.own.device)
            buffer_C = chunk.gradients_C = self.pool.take(like, chunk.layout.numel)
        elif self._keeps_whole and _is_inside(chunk.own.gradient_S, buffer_C):
            # stage 1: the result of the last pass lies in the buffer that this pass fills
            assert chunk.own.gradient_S is not None
            chunk.own.gradient_S = chunk.own.gradient_S.clone()
        return buffer_C

    def start(self, chunk: Chunk) -> Ending:
        """Start the exchange of a chunk; what is returned ends it.

        Collectives: one reduce-scatter on the shard axis, one all-reduce of the slice on the
        replicate axis.
        """
        buffer_C = self.buffer(chunk)
        for record in chunk.records:
            if not record.has_arrived:
                slot = record.slot
                buffer_C.narrow(0, slot.start, slot.numel).zero_()
        for start, stop in chunk.layout.gaps():
            buffer_C.narrow(0, start, stop - start).zero_()
        if not self._keeps_whole:
            chunk.gradients_C = None
        shard, divisor = self._topology.shard, self.divisor
        is_native = not all(is_pairwise(axis, buffer_C.device) for axis in self._topology.axes)
        if buffer_C.dtype in HALF_DTYPES and divisor != 1 and is_native:
            # a native 16-bit sum may overflow where its mean does not
            buffer_C.div_(divisor)
            divisor = 1
        exchange = ReduceScatter(buffer_C, shard, self.pool.take, key=chunk.index)
        return Ending(self, chunk, buffer_C, exchange, divisor)

    def release(self, chunk: Chunk) -> None:
        """Forget the gradients of a chunk and return their memory."""
        chunk.gradients_C = None
        chunk.own.drop_gradient()

    def end_pass(self) -> None:
        """Return the memory of buffers that wait for reuse."""
        self.pool.clear()

    def communicate(
        self, chunk: Chunk, buffer_C: torch.Tensor, exchange: ReduceScatter, divisor: int
    ) -> tuple[torch.Tensor, int]:
        """Return the sum over all ranks, and what it is still to be divided by."""
        total_S = exchange.finish()
        replicate = self._topology.replicate
        if replicate.group is not None:
            if total_S.dtype != buffer_C.dtype:
                total_S, divisor = total_S.div_(divisor).to(buffer_C.dtype), 1
            all_reduce_in_rank_order(total_S, replicate, divisor=divisor, key=chunk.index)
            divisor = 1
        return total_S, divisor

    def end(
        self, chunk: Chunk, buffer_C: torch.Tensor, exchange: ReduceScatter, divisor: int
    ) -> None:
        """Add, divide and store one chunk's slice."""
        total_S, divisor = self.communicate(chunk, buffer_C, exchange, divisor)
        unused = list(exchange.received)
        own = chunk.own
        stays = self._keeps_whole or total_S.numel() == buffer_C.numel()
        if own.gradient_S is None and own.keeps_gradients_here:
            place_S = exchange.own_S if stays else _place(total_S, buffer_C, unused)
            own.keep_gradient(_divide(total_S, divisor, place_S))
        else:
            # rounded first: every stage then adds the same numbers
            own.keep_gradient(_divide(total_S, divisor, total_S).to(chunk.reduce_dtype))
            stays = self._keeps_whole
        if own.keeps_gradients_here and not self._keeps_whole:
            assert own.gradient_S is not None
            self.pool.meter.watch(own.gradient_S, Holding.SLICES)
        if not stays:
            unused.append(buffer_C)
        for tensor in unused:
            self.pool.give(tensor)


class Ending:
    """The end of a reduction that was started: a job of an executor."""

    def __init__(
        self,
        reduction: Reduction,
        chunk: Chunk,
        buffer_C: torch.Tensor,
        exchange: ReduceScatter,
        divisor: int,
    ) -> None:
        """Hold what is on its way."""
        self._reduction = reduction
        self._arguments = (chunk, buffer_C, exchange, divisor)

    def __call__(self) -> None:
        """Store the slice."""
        self._reduction.end(*self._arguments)

    def abandon(self) -> None:
        """Take part to the end, and store nothing."""
        self._reduction.communicate(*self._arguments)

    def receive(self) -> None:
        """Wait for the exchange alone."""
        self._arguments[2].wait()


def _place(
    total_S: torch.Tensor, buffer_C: torch.Tensor, unused: list[torch.Tensor]
) -> torch.Tensor:
    """Return memory for a slice: a received one, if possible that of the sum itself."""
    fits = [tensor for tensor in unused if tensor.dtype == buffer_C.dtype]
    fits.sort(key=lambda tensor: tensor is not total_S)
    if not fits:
        return buffer_C.new_empty(total_S.numel())
    unused[:] = [tensor for tensor in unused if tensor is not fits[0]]
    return fits[0]


def _divide(total_S: torch.Tensor, divisor: int, out_S: torch.Tensor) -> torch.Tensor:
    """Write ``total / divisor`` to ``out``, dividing before any rounding, and return it."""
    if total_S.dtype != out_S.dtype:
        return out_S.copy_(total_S.div_(divisor) if divisor != 1 else total_S)
    if divisor != 1:
        return torch.div(total_S, divisor, out=out_S)
    return out_S if out_S is total_S else out_S.copy_(total_S)


def _is_inside(slice_S: torch.Tensor | None, buffer_C: torch.Tensor) -> bool:
    """Return whether the slice is a view of the buffer."""
    return (
        slice_S is not None
        and slice_S.untyped_storage()._cdata == buffer_C.untyped_storage()._cdata
    )
