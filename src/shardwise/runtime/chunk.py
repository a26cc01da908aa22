"""One chunk on one rank: the flat buffers of several parameters; it never communicates.

Legend: _C whole chunk [layout.numel], _S the rank's slice [layout.slice_numel].

==============  =====  ==============  ===================================================
buffer          shape  dtype           held
==============  =====  ==============  ===================================================
parameters_C    C      param_dtype     always; the parameters are views into it
master_S        S      float32         with 16-bit parameters and master weights
gradients_C     C      reduce_dtype    from the first gradient until reduced (stage 1: until
zero_grad) gradient_S      S      reduce_dtype    from the reduction until zero_grad
==============  =====  ==============  ===================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runtime.collectives import Waitable, slice_of, wait_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardwise.layout import ChunkLayout
    from shardwise.runtime.managed import ManagedParameter
    from shardwise.runtime.topology import Axis


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
        self.records: list[ManagedParameter] = []
        self.parameters_C = parameters_C
        self.parameter_S = slice_of(parameters_C, axis.rank, axis.size)
        self.master_S = master_S
        self.reduce_dtype = reduce_dtype
        self.keeps_masters = keeps_masters
        self.gradients_C: torch.Tensor | None = None
        self.gradient_S: torch.Tensor | None = None
        self.num_missing = 0
        """Expected gradients that have not arrived in the open backward pass."""
        self.is_sent = False
        """The reduction of the open backward pass was started."""
        self.pending: list[Waitable] = []
        """All-gather of updated parameters in flight."""

    def bind(self, records: Sequence[ManagedParameter], rank: int) -> None:
        """Give every record its place and make its parameter a view into the chunk."""
        pieces = {piece.index: piece for piece in self.layout.pieces(rank)}
        by_index = {record.index: record for record in records}
        for slot in self.layout.slots:
            record = by_index[slot.index]
            record.place(self, slot, pieces.get(slot.index))
            record.parameter.data = record.view_in(self.parameters_C)
            self.records.append(record)

    @property
    def update_S(self) -> torch.Tensor:
        """The slice that the optimizer updates: the master where there is one."""
        return self.parameter_S if self.master_S is None else self.master_S

    @property
    def is_half_updated_in_float(self) -> bool:
        """True when the working slice must be refreshed from a master after an update."""
        return self.master_S is not None

    def ensure_master(self) -> None:
        """Make the master of a chunk whose parameters were frozen until now."""
        if self.keeps_masters and self.master_S is None:
            self.master_S = self.parameter_S.float()

    def refresh_working(self) -> None:
        """Round the master slice into the working slice."""
        if self.master_S is not None:
            self.parameter_S.copy_(self.master_S)

    def refresh_master(self, record: ManagedParameter, *, keeps_exact: bool = True) -> None:
        """Take the owned piece of the master from the working parameter.

        With ``keeps_exact``, elements that round to the working value stay as exact as they are.
        """
        if self.master_S is None:
            return
        piece, working = record.piece_in(self.master_S), record.piece_in(self.parameter_S)
        if piece is not None and working is not None:
            if keeps_exact:
                working = piece.where(piece.to(working.dtype) == working, working.to(piece.dtype))
            piece.copy_(working)

    def await_parameters(self) -> None:
        """Return when every rank's updated slice has arrived."""
        works, self.pending = self.pending, []
        wait_all(works)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the buffers by purpose, for accounting."""
        return {
            "parameters": [self.parameters_C],
            "masters": [] if self.master_S is None else [self.master_S],
            "gradients": [t for t in (self.gradients_C, self.gradient_S) if t is not None],
        }
