"""One sharded set of parameters: its records, chunks, reductions and publications put together.

``shard`` and ``ShardedOptimizer`` are thin faces over this object; it knows of no optimizer.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError, mismatch
from shardwise.runtime.absent import describing
from shardwise.runtime.build import (
    PackingPolicy,
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
from shardwise.runtime.divergence import Whereabouts
from shardwise.runtime.dry import is_dry_run
from shardwise.runtime.managed import ATTRIBUTE, ManagedParameter, record_of
from shardwise.runtime.reducer import OUTSIDE_BACKWARD, UNSCALED, GradientReducer
from shardwise.runtime.reduction import Reduction
from shardwise.runtime.residence import Residence
from shardwise.runtime.topology import is_counted, model_axes
from shardwise.runtime.values import ParameterValues

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from shardwise.options import MixedPrecision
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.materialise import Materialiser
    from shardwise.runtime.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of one engine."""

    stage: int
    """0 to 3."""
    packing: PackingPolicy
    """Dtypes and chunks."""
    sums_gradients: bool = False
    """Sum gradients over ranks instead of averaging them."""
    knows_model: bool = False
    """Parameters are used inside one known module, so that first uses can wait for updates."""
    leaves_stand_ins: bool = True
    """Put a stand-in into ``parameter.grad`` while a reduced gradient is held; else None."""
    keep_bytes: float = 0
    """Stage 3: gathered bytes to keep between forward and backward; inf keeps all."""
    prefetch_bytes: int | None = None
    """Stage 3: bytes gathered ahead of their use; None allows one bundle."""


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
        check_same_on_all_ranks(named, settings, topology)
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
        self.residence: Residence | None = None
        """What brings and releases chunks; None where all are resident."""
        by_record = {r: atoms[r.parameter] for r in self.records if atoms and r.parameter in atoms}
        self._pack(by_record, materialiser.read if materialiser else read_parameter)
        self.values = ParameterValues(self)

    def _pack(
        self,
        atoms: dict[ManagedParameter, int],
        read: Callable[[ManagedParameter], torch.Tensor],
        *,
        is_repacking: bool = False,
    ) -> None:
        """Put all records into chunks and watch them."""
        before, options, topology = self.residence, self.options, self.topology
        with torch.no_grad():
            self.chunks = build_chunks(
                self.records,
                topology,
                options.packing,
                atoms,
                read=read,
                is_repacking=is_repacking,
            )
        if options.packing.keeps_slices and topology.shard.size > 1:
            self.residence = Residence(self, before)
        for record in self.records:
            if record.chunk.presence is Presence.RESIDENT:
                record.seen_version = record.parameter._version
        self.reducer = self._make_reducer()

    def _make_reducer(self) -> GradientReducer:
        """Watch the gradients of the chunks as they are now."""
        reducer = GradientReducer(
            self.records,
            self.chunks,
            self.topology,
            reduction=Reduction(
                self.topology,
                keeps_whole=self.options.stage == 1,
                divisor=1 if self.options.sums_gradients else self.topology.size,
            ),
            leaves_stand_ins=self.options.leaves_stand_ins,
            whereabouts=self.whereabouts,
        )
        if self.residence is not None:
            reducer.on_end = self.residence.gatherer.end_backward
        reducer.on_weighted = partial(_weigh_with_nothing, weakref.ref(self))
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
        self.reducer.close()
        for record in self.records:
            if record.holds_stand_in:  # the collector does not see through .grad
                record.parameter.grad = None
            if not self.options.knows_model and record_of(record.parameter) is record:
                delattr(record.parameter, ATTRIBUTE)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied module is a plain module; at stage 3 its parameters refuse to be copied."""
        return

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """An unpickled module is a plain module."""
        return type(None), ()

    @property
    def precision(self) -> MixedPrecision | None:
        """The dtype policy."""
        return self.options.packing.precision

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

    def repack(self, atoms: Mapping[nn.Parameter, int]) -> None:
        """Pack again with other atoms, before any gradient or optimizer state exists.

        Exact masters move along. Collectives: a broadcast per chunk and axis, and an all-gather of
        the masters.
        """
        has_gradients = self.reducer.is_open or any(record.is_held for record in self.records)
        if has_gradients or self.was_updated:
            raise ShardwiseError(
                mismatch(
                    "an optimizer that needs whole parameters",
                    expected="a model that was not trained since it was sharded",
                    got="gradients" if has_gradients else "updates of an earlier optimizer",
                    fix="make the ShardedOptimizer before the first backward pass",
                )
            )
        self.values.settle()
        masters = {
            record: record.view_in(self.gather(record.chunk, record.chunk.master_S)).clone()
            for record in self.records
            if record.chunk.master_S is not None
        }
        self.reducer.close()
        by_record = {r: atoms[r.parameter] for r in self.records if r.parameter in atoms}
        read = read_parameter if self.residence is None else self.residence.read
        self._pack(by_record, read, is_repacking=True)
        with torch.no_grad():
            for record, master in masters.items():
                self.values.write_master(record, master)

    def refuse_stale_forward(self) -> None:
        """Raise before a forward on top of a backward pass that ended in an error."""
        outside = torch._C._current_graph_task_id() == OUTSIDE_BACKWARD
        if torch.is_grad_enabled() and self.reducer.is_open and outside:
            raise ShardwiseError(
                mismatch(
                    "forward",
                    expected="a finished backward pass before it",
                    got="one that ended in an error",
                    fix="call optimizer.zero_grad() and repeat the step",
                )
            )

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
            record.local = None
            if set_to_none:
                record.parameter.grad = None
                record.is_held = False
            elif record.parameter.grad is not None and not record.is_held:
                record.parameter.grad.zero_()
        for chunk in {record.chunk: None for record in members}:
            if not any(record.is_held for record in chunk.records):
                self.reducer.reduction.release(chunk)
                continue
            for record in members:
                if record.chunk is chunk:
                    record.zero_gradient()

        self.forget_factors()

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

    def full_gradient(self, record: ManagedParameter) -> torch.Tensor | None:
        """Return the reduced gradient of one parameter, whole, in at least float32.

        Collectives: one all-gather of the chunk, and those of ``gradient_divisor``.
        """
        slice_S = record.chunk.gradient_S
        if not record.is_held or slice_S is None:
            return None
        whole = record.view_in(self.gather(record.chunk, slice_S))
        whole = whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True)
        return record.globalise(whole.div_(self.gradient_divisor()))

    def gather(self, chunk: Chunk, slice_S: torch.Tensor) -> torch.Tensor:
        """Return a new chunk-sized buffer with every rank's slice. Collectives: one all-gather."""
        axis = self.topology.shard
        buffer_C = slice_S.new_empty(chunk.layout.numel)
        slice_of(buffer_C, axis.rank, axis.size).copy_(slice_S)
        wait_all(start_all_gather(buffer_C, axis, Channel.GATHER_GRADIENTS))
        return buffer_C


def _weigh_with_nothing(engine: weakref.ref[Engine]) -> None:
    """Let a rank that had no pass of its own take part in a weighted one."""
    target = engine()
    if target is not None and target.local_weight is None:
        target.weigh(0.0)
