"""Values of parameters on this rank: bring, write, publish and take them back.

Between the engine and its chunks: what a stage does with values is decided here, when and by whom
it is asked for is not.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import ShardwiseError, mismatch
from shardwise.runtime.chunk import Presence
from shardwise.runtime.collectives import broadcast_from_first, slice_of
from shardwise.runtime.publisher import publish, settle_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.managed import ManagedParameter


class ParameterValues:
    """The values of one engine's parameters, and their masters."""

    def __init__(self, engine: Engine) -> None:
        """Serve one engine, whatever chunks it has."""
        self._engine = engine

    def write_master(self, record: ManagedParameter, whole: torch.Tensor) -> None:
        """Store the owned piece of a whole float32 value in the master."""
        slices = record.chunk.own
        slices.ensure_master()
        with slices.at_hand():
            own, piece = record.cut(whole), record.piece_in(slices.update_S)
            if own is not None and piece is not None:
                piece.copy_(own)

    def bring(self, record: ManagedParameter, func: Callable[..., Any]) -> None:
        """Make an absent parameter plain because an operator takes it.

        Collectives: at stage 3 an all-gather of its chunk.

        Raises:
            ShardwiseError: At stage 3, outside of forward and backward.
        """
        if self._engine.residence is None:
            settle_chunk(record.chunk)
        else:
            self._engine.residence.bring(record, func)

    @property
    def takes_pieces(self) -> bool:
        """True while a write to an absent parameter can only mean to store the owned piece."""
        return self._engine.residence is not None and not self._engine.residence.is_computing

    def write(self, record: ManagedParameter, whole: torch.Tensor) -> None:
        """Store the owned piece of a whole value, exactly in the master. Collectives: none."""
        chunk, residence = record.chunk, self._engine.residence
        chunk.num_updates += 1
        if chunk.presence is Presence.GATHERING and residence is not None:
            residence.gatherer.release(chunk)  # what is arriving is old
        if chunk.is_whole and not chunk.pending:
            record.values.copy_(whole)
            record.seen_version = record.parameter._version
        with chunk.own.at_hand():
            own, piece = record.cut(whole), record.piece_in(chunk.own.parameter_S)
            if own is not None and piece is not None:
                piece.copy_(own)
            if chunk.own.has_master:
                self.write_master(record, whole)

    def publish(self, chunk: Chunk) -> None:
        """Send an updated slice to the other ranks. Collectives: one all-gather, started here.

        At stage 3 none: the next use gathers it.
        """
        self._engine.was_updated = True
        self.announce(chunk)

    def announce(self, chunk: Chunk) -> None:
        """Send a slice that was written without an optimizer. Collectives: as ``publish``."""
        chunk.num_updates += 1
        if self._engine.residence is not None:
            if any(record.lingers for record in chunk.records):
                chunk.void_graphs()
            return
        publish(chunk, self._engine.topology.shard, lazily=self._engine.options.knows_model)

    @contextmanager
    def whole(self, records: Sequence[ManagedParameter]) -> Generator[None]:
        """Inside, some parameters are whole and newest. Collectives: all-gathers at stage 3.

        Raises:
            BudgetError: They do not fit beside what is held; nothing was gathered.
        """
        self.settle()
        if self._engine.residence is None:
            yield
        else:
            if self._engine.adaptation is not None:
                chunks = {record.chunk for record in records}
                self._engine.adaptation.refuse_whole(self._engine, chunks)
            with self._engine.residence.whole(records):
                yield

    def adopt_whole(self, records: Sequence[ManagedParameter]) -> None:
        """Take values written to whole parameters from the first rank. Collectives: broadcasts."""
        self.adopt_moved()
        axis = self._engine.topology.shard
        for chunk in {record.chunk: None for record in records}:
            broadcast_from_first(chunk.whole_C, self._engine.topology)
            chunk.num_updates += 1
            if chunk.presence is not Presence.RESIDENT:
                with chunk.own.at_hand():
                    chunk.own.parameter_S.copy_(slice_of(chunk.whole_C, axis.rank, axis.size))
        self.refresh_masters(records)

    def disown(self, records: Sequence[ManagedParameter]) -> None:
        """Drop what was written to whole parameters, where they are about to be released."""
        for record in records:
            if record.chunk.presence is Presence.GATHERED:
                self._engine.reducer.forget(record)
                record.is_disowned = True
                record.seen_version = record.parameter._version

    @property
    def are_in_flight(self) -> bool:
        """True when some parameter may still hold its old value on this rank."""
        return self._engine.residence is None and any(c.pending for c in self._engine.chunks)

    def settle(self) -> None:
        """Wait until every resident parameter has its newest value on this rank."""
        if self._engine.residence is not None:
            return
        for chunk in self._engine.chunks:
            if chunk.pending:
                settle_chunk(chunk)

    def refresh_changed_masters(self) -> None:
        """Take masters from working parameters that autograd saw written since the last update."""
        if self._engine.residence is not None:
            self._engine.residence.prepare_update()
            return
        self.adopt_moved()
        self.refresh_masters(
            r for r in self._engine.records if r.parameter._version != r.seen_version
        )

    def refresh_masters(
        self, records: Iterable[ManagedParameter], *, keeps_exact: bool = True
    ) -> None:
        """Take the masters of some parameters from their working values.

        With ``keeps_exact``, a master that rounds to the working value already stays.
        """
        axis = self._engine.topology.shard
        members = list(records)
        for chunk in {record.chunk: None for record in members}:
            if chunk.presence is Presence.GATHERED:
                with chunk.own.at_hand():
                    chunk.own.parameter_S.copy_(slice_of(chunk.whole_C, axis.rank, axis.size))
        for record in members:
            if not record.chunk.pending:
                record.chunk.own.refresh_master(record, keeps_exact=keeps_exact)
                if record.chunk.is_whole:
                    record.seen_version = record.parameter._version

    def adopt_moved(self) -> None:
        """Bring values back into the chunk where the user has replaced ``parameter.data``."""
        for record in self._engine.records:
            parameter = record.parameter
            buffer_C = record.chunk.parameters_C
            if record.chunk.pending or buffer_C is None or record.lies_in(buffer_C):
                continue
            home = record.view_in(buffer_C)
            if _kind_of(parameter) != _kind_of(home):
                raise ShardwiseError(
                    mismatch(
                        f"parameter {record.name!r}",
                        expected=_kind_of(home),
                        got=_kind_of(parameter),
                        fix="move, cast or reshape the module before sharding it",
                    )
                )
            self._engine.reducer.forget(record)
            with torch.no_grad():
                home.copy_(parameter)
            parameter.data = home
            record.chunk.own.refresh_master(record)


def _kind_of(tensor: torch.Tensor) -> str:
    """Describe what a replacement of a parameter's values must keep."""
    return f"shape {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
