"""One chunk on one rank: the flat buffers of several parameters; it never communicates.

Legend: _C whole chunk [layout.numel], _S the rank's slice [layout.slice_numel].

==============  =====  ==============  ===================================================
buffer          shape  dtype           held
==============  =====  ==============  ===================================================
parameters_C    C      param_dtype     RESIDENT: always; else while GATHERED; the parameters are
                                       views into it
gradients_C     C      reduce_dtype    from the first gradient until reduced (stage 1: until
                                       zero_grad)
own             S                      see ``own_slices``
==============  =====  ==============  ===================================================
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from shardwise.runtime.absent import describing, hide, show
from shardwise.runtime.collectives import Waitable, slice_of, wait_all
from shardwise.runtime.own_slices import OwnSlices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.layout import ChunkLayout
    from shardwise.runtime.managed import ManagedParameter
    from shardwise.runtime.state_slices import StateSlices
    from shardwise.runtime.topology import Axis


class Presence(Enum):
    """Whether the whole chunk is on this rank."""

    RESIDENT = "always (stages 0 to 2, or a shard axis of one rank)"
    RELEASED = "no: only the slice is; the parameters are absent"
    GATHERING = "soon: slices of other ranks are arriving; the parameters are absent"
    GATHERED = "yes, for a while: the parameters are plain"


_MAY_BECOME: dict[Presence, frozenset[Presence]] = {
    Presence.RESIDENT: frozenset({Presence.RELEASED}),
    Presence.RELEASED: frozenset({Presence.GATHERING}),
    Presence.GATHERING: frozenset({Presence.GATHERED, Presence.RELEASED}),
    Presence.GATHERED: frozenset({Presence.RELEASED}),
}


class Chunk:
    """Buffers and per-backward counters of one chunk."""

    def __init__(
        self,
        layout: ChunkLayout,
        *,
        parameters_C: torch.Tensor,
        master_S: torch.Tensor | None,
        reduce_dtype: torch.dtype,
        keeps_masters: bool,
        axis: Axis,
    ) -> None:
        """Own the given buffers."""
        self.layout = layout
        self.index = 0
        """Position among the chunks of its engine."""
        self.bundle = 0
        """Chunks of one bundle are gathered together: usually there is one."""
        self.records: list[ManagedParameter] = []
        self.presence = Presence.RESIDENT
        self.parameters_C: torch.Tensor | None = parameters_C
        self.own = OwnSlices(
            slice_of(parameters_C, axis.rank, axis.size), master_S, keeps_masters=keeps_masters
        )
        self.reduce_dtype = reduce_dtype
        self._axis = axis
        self.gradients_C: torch.Tensor | None = None
        self.num_missing = 0
        """Expected gradients that have not arrived in the open backward pass."""
        self.is_sent = False
        """The reduction of the open backward pass was started."""
        self.pending: list[Waitable] = []
        """All-gather of parameters in flight."""
        self.num_updates = 0
        """How often the values were replaced: graphs that saved older ones are void."""
        self.num_pins = 0
        """Running units and others that need the whole chunk to stay."""
        self.is_needed_in_backward = True
        """Some rank's backward pass reads values; True until the ranks have agreed otherwise."""
        self.was_read_in_backward = False
        """This rank's backward pass, since the ranks last agreed."""

    def bind(self, records: Sequence[ManagedParameter], rank: int) -> None:
        """Give every record its place and make its parameter a view into the chunk."""
        assert self.parameters_C is not None
        pieces = {piece.index: piece for piece in self.layout.pieces(rank)}
        by_index = {record.index: record for record in records}
        for slot in self.layout.slots:
            record = by_index[slot.index]
            record.place(self, slot, pieces.get(slot.index))
            show(record.parameter)
            record.fill(record.view_in(self.parameters_C))
            record.note_idle()
            self.records.append(record)

    # ------------------------------------------------------------------ presence

    @cached_property
    def label(self) -> str:
        """Number and contents, for messages."""
        return f"chunk {self.index} ({self.records[0].name}, ...)"

    @property
    @describing
    def is_trainable(self) -> bool:
        """There are updates, or will be as soon as a parameter has a gradient."""
        return self.own.is_updated or any(r.parameter.requires_grad for r in self.records)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.own.dtype

    @property
    def like(self) -> torch.Tensor:
        """An empty tensor of the dtype and device of the whole chunk."""
        return torch.empty(0, dtype=self.own.dtype, device=self.own.device)

    @property
    def whole_bytes(self) -> int:
        """Size of the whole chunk."""
        return self.layout.numel * self.own.dtype.itemsize

    @property
    def whole_C(self) -> torch.Tensor:
        """The whole buffer, where there is one."""
        assert self.parameters_C is not None
        return self.parameters_C

    @property
    def is_whole(self) -> bool:
        """True while the parameters have values on this rank."""
        return self.presence in (Presence.RESIDENT, Presence.GATHERED)

    def _nothing(self) -> torch.Tensor:
        """Return the one value that absent parameters show."""
        return torch.full((), torch.nan, dtype=self.own.dtype, device=self.own.device)

    def move_to(self, presence: Presence) -> None:
        """Change presence, which only some ways allow."""
        assert presence in _MAY_BECOME[self.presence], (self.presence, presence)
        self.presence = presence

    def shed(self, home: StateSlices | None) -> None:
        """Keep only the slice from now on, off the accelerator where it has a home there."""
        self.own.detach(home)
        self.let_go()

    def note_idle(self) -> None:
        """Count who holds absent parameters: an optimizer does, for one, and saves no values."""
        if not self.is_whole:
            for record in self.records:
                if not record.lingers:
                    record.note_idle()

    def expect(self, buffer_C: torch.Tensor, works: list[Waitable]) -> None:
        """Note that the whole chunk is arriving in a buffer."""
        self.move_to(Presence.GATHERING)
        self.parameters_C, self.pending = buffer_C, works

    def arrive(self) -> None:
        """Wait for the whole chunk and make its parameters plain."""
        works, self.pending = self.pending, []
        wait_all(works)
        self.move_to(Presence.GATHERED)
        for record in self.records:
            show(record.parameter)
            record.fill(record.view_in(self.whole_C))
            record.seen_version = record.parameter._version

    def abandon(self) -> None:
        """Give up a gather that has failed: what is in its buffer must not pass for values."""
        self.move_to(Presence.RELEASED)
        self.parameters_C, self.pending = None, []
        for record in self.records:
            show(record.parameter)
            record.fill(self._nothing().expand(record.shape))
            hide(record.parameter)

    def let_go(self, *, voids_graphs: bool = False) -> torch.Tensor:
        """Make the parameters absent, keep what was written to them, and return the buffer.

        With ``voids_graphs``, backward over a graph that saved the parameters themselves raises.
        """
        self.move_to(Presence.RELEASED)
        buffer_C, self.parameters_C = self.whole_C, None
        own_S = slice_of(buffer_C, self._axis.rank, self._axis.size)
        nan = self._nothing()
        changed = [
            r
            for r in self.records
            if r.parameter._version != r.seen_version or not (r.is_disowned or r.lies_in(buffer_C))
        ]
        for record in changed:
            if not record.lies_in(buffer_C) and record.values.dtype == buffer_C.dtype:
                record.view_in(buffer_C).copy_(record.values)
        if changed:
            self.num_updates += 1
            with self.own.at_hand():
                self.own.parameter_S.copy_(own_S)
        for record in self.records:
            record.is_disowned = False
            record.lingers = record.is_saved and record.lies_in(buffer_C)
            if not record.lingers:
                record.fill(nan.expand(record.shape))
                record.note_idle()
        if voids_graphs:
            self.void_graphs()
        for record in self.records:
            record.seen_version = record.parameter._version
            hide(record.parameter)
        for record in changed:
            self.own.refresh_master(record)
        return buffer_C

    @describing
    def blank(self) -> None:
        """Let go of buffers that parameters kept because a graph had saved the parameters."""
        if self.presence is not Presence.RELEASED:
            return
        for record in self.records:
            if record.lingers and record.num_uses <= record.idle_uses:
                record.lingers = False
                record.fill(self._nothing().expand(record.shape))
                record.note_idle()

    def void_graphs(self) -> None:
        """Make backward raise over graphs that have saved the parameters themselves."""
        torch.autograd.graph.increment_version([record.parameter for record in self.records])
        for record in self.records:
            record.seen_version = record.parameter._version

    def await_parameters(self) -> None:
        """Return when every rank's updated slice has arrived."""
        works, self.pending = self.pending, []
        wait_all(works)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the buffers by purpose, for accounting."""
        own = self.own.tensors()
        if self.parameters_C is not None:
            is_apart = self.presence is not Presence.RESIDENT
            own["parameters"] = [self.parameters_C, *(own["parameters"] if is_apart else [])]
        if self.gradients_C is not None:
            own["gradients"].insert(0, self.gradients_C)
        return own
