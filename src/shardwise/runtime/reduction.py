"""Reduce one chunk's gradients into the rank's slice; when that happens is the reducer's matter.

The sum runs in rank order over the shard axis, then over the replicate axis, and is divided once,
before it is rounded to a 16-bit slice. Buffers are reused within a backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.options import HALF_DTYPES
from shardwise.runtime.collectives import ReduceScatter, all_reduce_in_rank_order, is_pairwise

if TYPE_CHECKING:
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.topology import Topology
    from shardwise.runtime.worker import Job


class Reduction:
    """Gradient buffers and their reduction."""

    def __init__(self, topology: Topology, *, keeps_whole: bool, divisor: int) -> None:
        """Set what is common to all chunks.

        Args:
            topology: The axes to reduce over.
            keeps_whole: Stage 1: whole gradient buffers stay until ``release``.
            divisor: Every sum is divided by it: the number of ranks, or 1 for sums.
        """
        self._topology = topology
        self._keeps_whole = keeps_whole
        self.divisor = divisor
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        """Return the chunk's whole gradient buffer [C], making one where there is none."""
        buffer_C = chunk.gradients_C
        if buffer_C is None:
            key = (chunk.layout.numel, chunk.reduce_dtype)
            free = self._free.get(key)
            buffer_C = (
                free.pop()
                if free
                else torch.empty_like(chunk.parameters_C, dtype=chunk.reduce_dtype)
            )
            chunk.gradients_C = buffer_C
        elif self._keeps_whole and _is_inside(chunk.gradient_S, buffer_C):
            # stage 1: the result of the last pass lies in the buffer that this pass fills
            assert chunk.gradient_S is not None
            chunk.gradient_S = chunk.gradient_S.clone()
        return buffer_C

    def start(self, chunk: Chunk) -> Job:
        """Start the exchange of a chunk; the returned job ends it.

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
        if buffer_C.dtype in HALF_DTYPES and divisor != 1 and not is_pairwise(shard, buffer_C):
            # a native 16-bit sum may overflow where its mean does not
            buffer_C.div_(divisor)
            divisor = 1
        exchange = ReduceScatter(buffer_C, shard)
        return lambda: self._end(chunk, buffer_C, exchange, divisor)

    def release(self, chunk: Chunk) -> None:
        """Forget the gradients of a chunk and return their memory."""
        chunk.gradients_C = None
        chunk.gradient_S = None

    def end_pass(self) -> None:
        """Return the memory of buffers that wait for reuse."""
        self._free.clear()

    def _end(
        self, chunk: Chunk, buffer_C: torch.Tensor, exchange: ReduceScatter, divisor: int
    ) -> None:
        """Add, divide and store one chunk's slice."""
        total_S = exchange.finish()
        replicate = self._topology.replicate
        if replicate.group is not None:
            if total_S.dtype != buffer_C.dtype:
                total_S, divisor = total_S.div_(divisor).to(buffer_C.dtype), 1
            all_reduce_in_rank_order(total_S, replicate, divisor=divisor)
            divisor = 1
        if chunk.gradient_S is not None:
            if divisor != 1:
                total_S.div_(divisor)
            # rounded first: every stage then adds the same numbers
            chunk.gradient_S.add_(total_S.to(chunk.gradient_S.dtype))
            self._recycle(buffer_C)
            return
        stays = self._keeps_whole or total_S.numel() == buffer_C.numel()
        out_S = exchange.own_S if stays else buffer_C.new_empty(total_S.numel())
        _store(total_S, divisor, out_S)
        chunk.gradient_S = out_S
        if not stays:
            self._recycle(buffer_C)

    def _recycle(self, buffer_C: torch.Tensor) -> None:
        """Offer a buffer for reuse by the next chunk of this pass."""
        if not self._keeps_whole:
            self._free.setdefault((buffer_C.numel(), buffer_C.dtype), []).append(buffer_C)


def _store(total_S: torch.Tensor, divisor: int, out_S: torch.Tensor) -> None:
    """Write ``total / divisor`` into the slice, dividing before any rounding."""
    if total_S.dtype == out_S.dtype and divisor != 1:
        torch.div(total_S, divisor, out=out_S)
    elif total_S is not out_S:
        out_S.copy_(total_S if divisor == 1 else total_S.div_(divisor))


def _is_inside(slice_S: torch.Tensor | None, buffer_C: torch.Tensor) -> bool:
    """Return whether the slice is a view of the buffer."""
    return (
        slice_S is not None
        and slice_S.untyped_storage()._cdata == buffer_C.untyped_storage()._cdata
    )
