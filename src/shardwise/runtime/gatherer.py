"""Which chunks are whole when, at stage 3: a cache of gathered chunks with a byte limit.

Life of a chunk in one pass::

    fetch(chunk)    a unit, an operator or backward needs it: make room, start its gather, start
                    gathers of what the recorded order says comes next, wait, show the parameters
    pin / unpin     a running unit keeps its chunks
    release(chunk)  the parameters become absent; the buffer is reused if nothing else refers to it

Letting go is safe at any moment: a later use fetches again. See ADR 0005.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from shardwise.residency import Segment
from shardwise.runtime.chunk import Presence
from shardwise.runtime.collectives import Channel, slice_of, start_all_gather, wait_all
from shardwise.runtime.divergence import explain
from shardwise.runtime.meter import Holding
from shardwise.runtime.pool import has_views
from shardwise.runtime.uses import UseOrder

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.divergence import Whereabouts
    from shardwise.runtime.pool import BufferPool
    from shardwise.runtime.recorder import Recorder

OUTSIDE_BACKWARD = -1


class Gatherer:
    """Gathers and releases the chunks of one engine."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        whereabouts: Whereabouts,
        pool: BufferPool,
        recorder: Recorder,
        keep_bytes: float = 0,
        prefetch_bytes: int | None = None,
    ) -> None:
        """Serve chunks that are released.

        Args:
            chunks: All of the engine, in order of definition.
            whereabouts: Is told what this rank does, for when the ranks of its axis do not meet.
            recorder: Is told of every use.
            pool: Where buffers come from and go to; its meter is told what they are for.
            keep_bytes: Gathered bytes to keep where two bundles and prefetch are less; may be inf.
            prefetch_bytes: Bytes that may be gathered ahead of their use; default: one bundle.
        """
        by_bundle: Counter[int] = Counter()
        for chunk in chunks:
            by_bundle[chunk.bundle] += chunk.whole_bytes
        sizes = sorted(by_bundle.values(), reverse=True)
        ahead = (sizes[0] if sizes else 0) if prefetch_bytes is None else prefetch_bytes
        self._bundle_bytes = sizes[0] if sizes else 0
        self.prefetch_bytes = ahead
        self.limit_bytes = max(sum(sizes[:2]) + ahead, keep_bytes)
        """Whole chunks take no more than this, unless pinned ones alone do."""
        self._least_bytes = max(sum(sizes[:2]), keep_bytes)
        self.rest_bytes = self._least_bytes
        """What stays between forward and backward, when activations take the most."""
        self.keeps = keep_bytes > 0
        """Chunks stay after a forward pass without gradients."""
        self.keeps_all = math.isinf(keep_bytes)
        """Chunks stay until a step; autograd may therefore save the parameters themselves."""
        self.order: UseOrder[Chunk] = UseOrder()
        self.gathered_bytes = 0
        self.peak_bytes = 0
        """High-water mark of ``gathered_bytes``; may be reset by who reads it."""
        self.num_gathers = 0
        self._chunks = list(chunks)
        self._whereabouts = whereabouts
        self._axis = whereabouts.axis
        self._present: dict[Chunk, None] = {}
        self._by_storage: dict[int, Chunk] = {}
        self._pool = pool
        self._recorder = recorder
        self._is_in_backward = False
        self._is_in_forward = False
        self._reading: set[Chunk] = set()

    def widen(self, spare_bytes: int) -> None:
        """Let gathered chunks take more than the two largest bundles: ahead of use, then after."""
        self.prefetch_bytes = min(self._bundle_bytes, spare_bytes)
        self.limit_bytes = self.rest_bytes = self._least_bytes + spare_bytes

    # ------------------------------------------------------------------ use

    def begin(self, segment: Segment) -> None:
        """Start a forward pass; backward begins with its first use."""
        self._is_in_backward, self._is_in_forward = False, True
        self.order.begin(segment)

    def fetch(self, chunk: Chunk) -> None:
        """Return when the chunk is whole. Collectives: an all-gather where it was not coming."""
        in_backward = torch._C._current_graph_task_id() != OUTSIDE_BACKWARD
        if in_backward and not self._is_in_backward:
            self._is_in_backward = True
            self.order.begin(Segment.BACKWARD)
        if in_backward or self._is_in_forward:
            self.order.note(chunk)
            self._recorder.note((chunk,), self.order.segment)
        chunk.num_pins += 1
        try:
            with _plainly():
                if chunk.presence is Presence.RELEASED:
                    self._make_room(chunk, next_use=0)
                    self._start(chunk)
                self._present[chunk] = self._present.pop(chunk)  # the most recently used
                self._prefetch(chunk)
                if chunk.presence is Presence.GATHERING:
                    self._arrive(chunk)
        finally:
            chunk.num_pins -= 1

    def read_in_backward(self, chunk: Chunk) -> None:
        """Return when values that a gradient depends on are there.

        Which ranks come here depends on what they computed, so nothing that all ranks must decide
        alike is changed where the chunk is there already.
        """
        chunk.was_read_in_backward = True
        if chunk.presence is not Presence.GATHERED:
            self.fetch(chunk)

    def pin(self, chunks: Sequence[Chunk]) -> None:
        """Fetch chunks and keep them until ``unpin``; after an error none is kept."""
        for position, chunk in enumerate(chunks):
            chunk.note_idle()
            try:
                self.fetch(chunk)
            except BaseException:
                self.unpin(chunks[:position])
                raise
            chunk.num_pins += 1

    def unpin(self, chunks: Iterable[Chunk]) -> None:
        """Let chunks go again."""
        for chunk in chunks:
            chunk.num_pins -= 1

    @property
    def has_pins(self) -> bool:
        """True while some chunk must stay whole."""
        return any(chunk.num_pins for chunk in self._present)

    def owner_of(self, tensor: torch.Tensor) -> Chunk | None:
        """Return the gathered chunk that a tensor is a view of."""
        if not self._by_storage:
            return None
        try:
            storage = tensor.untyped_storage()._cdata
        except NotImplementedError:  # sparse tensors and wrappers have no storage
            return None
        chunk = self._by_storage.get(storage)
        if chunk is None or tensor.dtype != chunk.dtype or tensor.is_neg() or tensor.is_conj():
            return None
        return chunk

    # ------------------------------------------------------------------ letting go

    def release(self, chunk: Chunk) -> None:
        """Make a chunk's parameters absent."""
        if chunk.presence is Presence.GATHERING:
            try:
                self._arrive(chunk)  # its memory is being written to
            except RuntimeError:  # nobody waits for it; the next communication fails too
                return
        buffer_C = chunk.let_go(voids_graphs=self.keeps_all)
        self._forget(chunk, buffer_C)
        if not has_views(buffer_C):
            self._pool.give(buffer_C)

    def settle(self) -> None:
        """Return when no chunk is on its way."""
        for chunk in list(self._present):
            if chunk.presence is Presence.GATHERING:
                self._arrive(chunk)

    def close(self) -> None:
        """Let go of the memory of chunks that are no more: others hold their parameters."""
        for chunk in list(self._present):
            wait_all(chunk.pending)  # it is being written to
            self._forget(chunk, chunk.whole_C)
            chunk.parameters_C, chunk.pending = None, []
        self._pool.clear()

    def release_all(self) -> None:
        """Release what is not pinned and return the memory of buffers that wait for reuse."""
        for chunk in list(self._present):
            if not chunk.num_pins:
                self.release(chunk)
        self._forget_reads()
        self._pool.clear()

    def end_forward(self, *, with_grad: bool) -> None:
        """After the outermost unit: a pass without gradients leaves nothing behind."""
        self._is_in_forward = False
        if not with_grad and not self.keeps:
            self.release_all()
        elif with_grad:
            self.order.begin(Segment.BACKWARD)
            self._shrink_to(self.rest_bytes)
            self._pool.clear()

    def end_backward(self) -> None:
        """Leave nothing behind, unless chunks are kept until a step."""
        self._is_in_backward = False
        if not self.keeps_all:
            self.release_all()
        for chunk in self._chunks:
            chunk.blank()

    # ------------------------------------------------------------------ inside

    def _start(self, chunk: Chunk) -> None:
        """Begin to gather a released chunk."""
        buffer_C = self._pool.take(chunk.like, chunk.layout.numel)
        self._reading.discard(chunk)
        place_S = slice_of(buffer_C, self._axis.rank, self._axis.size)
        self._whereabouts.note("gather of", chunk)
        self._whereabouts.note_gather(chunk)
        works = start_all_gather(
            buffer_C,
            self._axis,
            Channel.GATHER_PARAMETERS,
            key=chunk.index,
            own_S=chunk.own.fill_own(place_S),
        )
        chunk.expect(buffer_C, works)
        self._pool.meter.watch(buffer_C, Holding.GATHERED)
        self._by_storage[buffer_C.untyped_storage()._cdata] = chunk
        self._present[chunk] = None
        self.num_gathers += 1
        self.gathered_bytes += chunk.whole_bytes
        self.peak_bytes = max(self.peak_bytes, self.gathered_bytes)

    def _arrive(self, chunk: Chunk) -> None:
        """Wait for a chunk that is on its way."""
        self._whereabouts.note("wait for", chunk)
        try:
            with explain(self._whereabouts):
                chunk.arrive()
        except BaseException:
            self._forget(chunk, chunk.whole_C)
            chunk.abandon()
            raise

    def _forget(self, chunk: Chunk, buffer_C: torch.Tensor) -> None:
        """Count a chunk as absent."""
        del self._present[chunk]
        self._pool.meter.watch(buffer_C, Holding.BUFFERS)
        del self._by_storage[buffer_C.untyped_storage()._cdata]
        self.gathered_bytes -= chunk.whole_bytes

    def _make_room(self, chunk: Chunk, *, next_use: float) -> bool:
        """Release what is used later than ``next_use`` until a chunk fits; False if it does not."""
        return self._shrink_to(self.limit_bytes - chunk.whole_bytes, next_use=next_use)

    def _shrink_to(self, limit_bytes: float, *, next_use: float = 0) -> bool:
        """Release what is used later than ``next_use`` until no more than a limit is gathered."""
        while self.gathered_bytes > limit_bytes:
            victim = self._victim(next_use)
            if victim is None:
                return False
            self.release(victim)
        return True

    def _victim(self, next_use: float) -> Chunk | None:
        """Return the chunk to release: that of the furthest next use, else the least recent."""
        victim, furthest = None, next_use
        for chunk in self._present:
            if chunk.num_pins:
                continue
            expected = self.order.next_use(chunk)
            distance = math.inf if expected is None else expected
            if distance > furthest:
                victim, furthest = chunk, distance
        return victim

    def _prefetch(self, current: Chunk) -> None:
        """Start gathers of the next chunks in the recorded order, within the limits."""
        ahead = 0
        looked_at: set[Chunk] = {current}
        for chunk in self.order.upcoming():
            if chunk in looked_at:
                continue
            looked_at.add(chunk)
            ahead += chunk.whole_bytes
            if chunk.presence is not Presence.RELEASED:
                if ahead > self.prefetch_bytes:
                    return
                continue
            if ahead > self.prefetch_bytes:
                self._read_ahead(chunk)
                return
            next_use = self.order.next_use(chunk)
            assert next_use is not None
            if not self._make_room(chunk, next_use=next_use):
                return
            self._start(chunk)

    def _read_ahead(self, chunk: Chunk) -> None:
        """Let this rank's slice of what will be gathered next come from disk."""
        if chunk.own.read_ahead():
            self._reading.add(chunk)

    def _forget_reads(self) -> None:
        """Let go of slices that were read for gathers which did not come."""
        for chunk in self._reading:
            chunk.own.forget_reads()
        self._reading.clear()


@contextmanager
def _plainly() -> Generator[None]:
    """Make tensors that are part of no function transform, and no inference tensors."""
    with temporarily_clear_interpreter_stack():
        if not torch.is_inference_mode_enabled():
            yield
        else:
            with torch.inference_mode(False), torch.no_grad():
                yield
