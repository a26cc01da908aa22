"""One sharded set of parameters: its records, chunks, reductions and publications put together.

``shard`` and ``ShardedOptimizer`` are thin faces over this object; it knows of no optimizer.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import ConfigurationError
from shardwise.runtime import refusals
from shardwise.runtime.absent import describing
from shardwise.runtime.agreement import raise_together
from shardwise.runtime.build import (
    build_chunks,
    check_parameters,
    check_same_on_all_ranks,
    read_parameter,
)
from shardwise.runtime.chunk import Presence
from shardwise.runtime.collectives import (
    Channel,
    all_reduce_scalars,
    slice_of,
    start_all_gather,
    wait_all,
)
from shardwise.runtime.divergence import Whereabouts, explain
from shardwise.runtime.dry import is_dry_run
from shardwise.runtime.managed import ATTRIBUTE, ManagedParameter, record_of
from shardwise.runtime.meter import Holding, Meter
from shardwise.runtime.offload import describe, open_offload
from shardwise.runtime.pool import BufferPool
from shardwise.runtime.recorder import Recorder
from shardwise.runtime.reducer import OUTSIDE_BACKWARD, UNSCALED, GradientReducer
from shardwise.runtime.reduction import Reduction
from shardwise.runtime.residence import Residence
from shardwise.runtime.topology import is_counted, model_axes
from shardwise.runtime.values import ParameterValues

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from shardwise.options import MixedPrecision
    from shardwise.runtime.adaptation import Adaptation
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine_options import EngineOptions
    from shardwise.runtime.materialise import Materialiser
    from shardwise.runtime.topology import Topology


class Engine:
    """The state of several parameters over the ranks of one topology."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        topology: Topology,
        options: EngineOptions,
        *,
        atoms: Mapping[nn.Parameter, int] | None = None,
        materialiser: Materialiser | None = None,
    ) -> None:
        """Check, broadcast and pack the parameters, and watch their gradients.

        Collectives: a check, then a broadcast per chunk and axis.

        Raises:
            ConfigurationError: Before anything is changed, on all ranks alike.
        """
        check_parameters(named, meta_as=topology.device if materialiser else None)
        packing = options.packing
        settings = (options.stage, packing.precision, packing.chunk_bytes, options.sums_gradients)
        self.offload, refusal = open_offload(options.offload, topology.device)
        settings += (describe(options.offload),)
        try:
            raise_together(refusal, topology, kind=ConfigurationError)
            check_same_on_all_ranks(named, settings, topology)
        except ConfigurationError:
            if self.offload is not None:
                self.offload.close()
            raise
        if self.offload is not None:
            weakref.finalize(self, self.offload.close)
        if self.adaptation is not None:
            self.adaptation.keep_bytes = options.keep_bytes
        self.packing = replace(packing, offload=self.offload)
        self.options = options
        self.left_out: frozenset[nn.Parameter] = frozenset()
        """Parameters of the module that are not sharded."""
        self.was_updated = False
        """An optimizer has stepped: its state belongs to the pieces as they are cut now."""
        self.gradient_scale = 1.0
        """Loss scale that the held gradients were produced with."""
        self.local_weight: float | None = None
        """Sum of this rank's weights behind the held gradients, None when they are not weighted."""
        self.companions: dict[type, Any] = {}
        """What layers above keep for as long as the engine lives, by its type."""
        self._num_faces = 0
        self.records = [
            ManagedParameter(parameter, name=name, index=index, engine=self)
            for index, (name, parameter) in enumerate(named)
        ]
        parallel = model_axes(record.parameter for record in self.records)
        self.topology = replace(topology, model=tuple(parallel.values()))
        for record in self.records:
            record.is_counted = is_counted(record.parameter, parallel)
        self.whereabouts = Whereabouts(topology.shard)
        self.meter = Meter(topology.device, is_on=self.adaptation is not None)
        self.recorder = Recorder(self.meter)
        self.pool = BufferPool(self.meter, is_frugal=self.has_limit)
        self.residence: Residence | None = None
        """What brings and releases chunks; None where all are resident."""
        by_record = {r: atoms[r.parameter] for r in self.records if atoms and r.parameter in atoms}
        self.pack(by_record, materialiser.read if materialiser else read_parameter)
        self.values = ParameterValues(self)

    def pack(
        self,
        atoms: dict[ManagedParameter, int],
        read: Callable[[ManagedParameter], torch.Tensor],
        *,
        is_repacking: bool = False,
    ) -> None:
        """Put all records into chunks and watch them."""
        before, _options, topology = self.residence, self.options, self.topology
        with torch.no_grad():
            self.chunks = build_chunks(
                self.records,
                topology,
                self.packing,
                atoms,
                read=read,
                is_repacking=is_repacking,
            )
        if self.packing.is_sliced(topology):
            self.residence = Residence(self, before)
        for chunk in self.chunks:
            if chunk.presence is Presence.RESIDENT:
                self.meter.watch(chunk.whole_C, Holding.RESIDENT)
        for record in self.records:
            if record.chunk.presence is Presence.RESIDENT:
                record.seen_version = record.parameter._version
        if self.adaptation is not None:
            self.adaptation.begin(self)
        self.reducer = self._make_reducer()

    def _make_reducer(self) -> GradientReducer:
        """Watch the gradients of the chunks as they are now."""
        reducer = GradientReducer(
            self.records,
            self.chunks,
            self.topology,
            reduction=Reduction(
                self.topology,
                self.pool,
                keeps_whole=self.options.stage == 1,
                divisor=1 if self.options.sums_gradients else self.topology.size,
            ),
            leaves_stand_ins=self.options.leaves_stand_ins,
            whereabouts=self.whereabouts,
        )
        if self.residence is not None:
            reducer.on_end = self.residence.gatherer.end_backward
        else:
            reducer.on_send = self.recorder.note_backward
        reducer.on_weighted = partial(_weigh_with_nothing, weakref.ref(self))
        if self.adaptation is not None:
            reducer.on_more_trained = self.adaptation.starter(self)
        return reducer

    def serve(self, face: object) -> None:
        """Watch the parameters as long as ``face``, a sharded module or an optimizer, lives.

        When the last face is gone all memory can be collected, and parameters that only an
        optimizer had sharded are plain again.
        """
        self._num_faces += 1
        weakref.finalize(face, self._leave).atexit = False

    def _leave(self) -> None:
        """Count a face that is gone."""
        self._num_faces -= 1
        if self._num_faces:
            return
        self._receive_the_last()
        self.reducer.close(None if self.offload is None else self.offload.close)
        for record in self.records:
            if record.holds_stand_in:  # the collector does not see through .grad
                record.parameter.grad = None
            if not self.options.knows_model and record_of(record.parameter) is record:
                delattr(record.parameter, ATTRIBUTE)

    def _receive_the_last(self) -> None:
        """Wait for messages on their way; after one for memory that is gone gloo reads no more."""
        with suppress(RuntimeError):  # of a peer that is gone: nothing is to come from it
            self.values.settle()
            if self.residence is not None:
                self.residence.gatherer.settle()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied module is a plain module; at stage 3 its parameters refuse to be copied."""
        return

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """An unpickled module is a plain module."""
        return type(None), ()

    @property
    def precision(self) -> MixedPrecision | None:
        """The dtype policy."""
        return self.packing.precision

    @property
    @describing
    def is_scaled(self) -> bool:
        """True when gradients are float16, so that losses must be scaled."""
        return any(
            record.parameter.requires_grad and record.parameter.dtype is torch.float16
            for record in self.records
        )

    @property
    @describing
    def has_gradients(self) -> bool:
        """True when some optimizer's gradient, with its factors, is held or waits under no_sync."""
        return any(
            (record.is_held and not record.is_zero) or record.has_local_gradient
            for record in self.records
            if record.is_claimed
        )

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return all buffers by purpose, for accounting."""
        by_purpose: dict[str, list[torch.Tensor]] = {}
        for chunk in self.chunks:
            for purpose, tensors in chunk.tensors().items():
                by_purpose.setdefault(purpose, []).extend(tensors)
        by_purpose.setdefault("gradients", []).extend(
            record.local for record in self.records if record.local is not None
        )
        return by_purpose

    def refuse_stale_forward(self) -> None:
        """Raise before a forward on top of a backward pass that ended in an error."""
        outside = torch._C._current_graph_task_id() == OUTSIDE_BACKWARD
        if torch.is_grad_enabled() and self.reducer.is_open and outside:
            raise refusals.unfinished_backward("forward")

    # ------------------------------------------------------------------ gradients

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate gradients on this rank alone; nests."""
        before = self.reducer.is_synchronising
        self.reducer.is_synchronising = False
        try:
            yield
        finally:
            self.reducer.is_synchronising = before

    @describing
    def zero_grad(self, records: Iterable[ManagedParameter], *, set_to_none: bool) -> None:
        """Clear the gradients of some parameters, reduced or not."""
        members = list(records)
        self.reducer.reset()
        if self.residence is not None:
            self.residence.recover()
        for record in members:
            record.local, record.is_replaced = None, False
            if set_to_none:
                record.parameter.grad = None
                record.is_held = False
            elif record.has_plain_gradient and record.parameter.grad is not None:
                record.parameter.grad.zero_()
        for chunk in {record.chunk: None for record in members}:
            if not any(record.is_held for record in chunk.records):
                self.reducer.reduction.release(chunk)
                continue
            for record in members:
                if record.chunk is chunk:
                    record.zero_gradient()

        self.forget_factors()
        if not self.has_gradients:  # another optimizer's may wait for their step
            self.meter.begin_step()  # what passes took whose gradients are dropped is no need

    @describing
    def forget_factors(self) -> None:
        """Start the next step with a fresh loss scale and weight, if no optimizer needs the old.

        Gradients that no optimizer will use are dropped where the factors were part of them.
        """
        self.reducer.drop_removed()
        if self.has_gradients:
            return
        if self.gradient_scale != 1.0 or self.local_weight is not None:
            for record in self.records:
                if record.is_held and not record.is_zero:
                    record.drop_gradient()
                    record.parameter.grad = None
        self.gradient_scale = 1.0
        self.weigh(None)

    def weigh(self, weight: float | None) -> None:
        """Count the weight of a coming backward pass; None ends weighting.

        Weighted gradients are summed over ranks, and divided by all weights only when they are
        used.
        """
        reduction = self.reducer.reduction
        refusal = self.reducer.bare_backward_refusal
        if weight is None:
            self.local_weight = None
            self.reducer.is_weighted = False
            sums = self.options.sums_gradients
            reduction.divisor = 1 if sums else self.topology.size
            self.reducer.bare_backward_refusal = UNSCALED if self.is_scaled else None
            return
        self.local_weight = (self.local_weight or 0.0) + weight
        self.reducer.is_weighted = True
        reduction.divisor = 1
        self.reducer.bare_backward_refusal = refusal or "the loss before it was weighted"

    @property
    def local_factor(self) -> float:
        """What a true gradient is multiplied by to lie among those of this rank."""
        return self.gradient_scale * (1.0 if self.local_weight is None else self.local_weight)

    def gradient_divisor(self) -> float:
        """Return what held gradients must be divided by: loss scale times global weight.

        Collectives: one all-reduce of one number per axis, where gradients are weighted.
        """
        if self.local_weight is None:
            return self.gradient_scale
        if is_dry_run():
            return self.gradient_scale * self.local_weight * self.topology.size
        weight = torch.tensor([self.local_weight], dtype=torch.float64)
        return self.gradient_scale * float(all_reduce_scalars(weight, self.topology.axes))

    def gather(self, chunk: Chunk, slice_S: torch.Tensor) -> torch.Tensor:
        """Return a new chunk-sized buffer with every rank's slice. Collectives: one all-gather."""
        axis = self.topology.shard
        device = self.topology.device
        buffer_C = torch.empty(chunk.layout.numel, dtype=slice_S.dtype, device=device)
        slice_of(buffer_C, axis.rank, axis.size).copy_(slice_S)
        self.whereabouts.note("gather of state or gradients of", chunk)
        with explain(self.whereabouts):
            wait_all(start_all_gather(buffer_C, axis, Channel.GATHER_GRADIENTS))
        return buffer_C

    @property
    def has_limit(self) -> bool:
        """The bytes on the accelerator are limited."""
        return self.adaptation is not None and self.adaptation.has_limit

    @property
    def adaptation(self) -> Adaptation | None:
        """What moves slices between tiers; None where homes are fixed."""
        return None if self.offload is None else self.offload.adaptation

    def end_step(self) -> None:
        """Wait for moves, and take what was recorded as one step."""
        self.settle_moves()
        if self.adaptation is not None:
            self.recorder.end_step(self.adaptation.sizes)

    def settle_moves(self) -> None:
        """Wait until all that was changed is where it rests.

        Raises:
            Exception: The error of a write.
        """
        if self.offload is not None:
            self.offload.mover.settle()

    def gather_update(self, chunk: Chunk) -> torch.Tensor:
        """Return what the optimizer updates, whole. Collectives: one all-gather."""
        with chunk.own.at_hand(is_changed=False):
            return self.gather(chunk, chunk.own.update_S)


def _weigh_with_nothing(engine: weakref.ref[Engine]) -> None:
    """Let a rank that had no pass of its own take part in a weighted one."""
    target = engine()
    if target is not None and target.local_weight is None:
        target.weigh(0.0)
