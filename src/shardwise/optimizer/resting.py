"""Optimizer state that rests off the accelerator: one flat slice per chunk and state name.

The wrapped optimizer makes its state as it always does, one tensor per piece. Where the state of a
chunk rests elsewhere, each of these is moved into the chunk's slice of that name and replaced by a
view of it. While a slice is on disk, pieces and state are stand-ins: the right shape, no values.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import BudgetError
from shardwise.optimizer.kinds import STATE_PER_PARAMETER, known_as
from shardwise.optimizer.pieces import is_whole_atom, shape_of_piece, shape_piece
from shardwise.runtime.agreement import raise_together

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from torch import nn

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.managed import ManagedParameter
    from shardwise.runtime.state_slices import StateSlices

    PieceOf = Callable[[ManagedParameter], nn.Parameter | None]

logger = logging.getLogger(__name__)


class RestingState:
    """Points pieces and their state at slices that come and go."""

    def __init__(self, optimizer: torch.optim.Optimizer, piece_of: PieceOf) -> None:
        """Serve the state of one optimizer."""
        self._optimizer = optimizer
        self._piece_of = piece_of
        self._away: dict[ManagedParameter, dict[str, str]] = {}
        """Which entries of a piece's state are views of which slice."""
        self._made: list[tuple[StateSlices, str]] = []
        weakref.finalize(self, _give_back, self._made).atexit = False
        self._foretold: dict[tuple[str, torch.dtype, tuple[int, ...]], dict[str, torch.dtype]] = {}
        self._unplaced: dict[Chunk, dict[str, torch.dtype]] = {}
        """Slices that state nobody could foretell had no room for; it lies where it was made."""

    def reserve(
        self, groups: Sequence[Sequence[ManagedParameter]], engines: Sequence[Engine]
    ) -> None:
        """Take room for the state that the first step will make, as far as that can be known.

        Raises:
            BudgetError: It is not there on some rank; nothing was changed on any.

        Collectives: an agreement per engine whose state rests elsewhere.
        """
        expected = self.expected(groups)
        for engine in engines:
            if engine.adaptation is not None:
                engine.adaptation.expect(engine, expected)
        self._add_foretold(groups, engines)
        for engine in engines:
            if engine.adaptation is not None:
                engine.adaptation.note_slices(engine)

    def _add_foretold(
        self, groups: Sequence[Sequence[ManagedParameter]], engines: Sequence[Engine]
    ) -> None:
        """Add slices for the state that can be foretold: on all ranks, or on none."""
        added: list[tuple[StateSlices, str]] = []
        error: BudgetError | None = None
        try:
            for group, records in zip(self._optimizer.param_groups, groups, strict=True):
                for record in records:
                    slices = record.chunk.own.state
                    for name, dtype in self._foretell(group, record).items():
                        key = self._key_of(name, dtype)
                        if slices is not None and self._add(slices, key, dtype):
                            added.append((slices, key))
        except BudgetError as refusal:
            error = refusal
        try:
            for engine in engines:
                if engine.offload is not None:
                    raise_together(error, engine.topology)
        except BudgetError:
            for slices, key in added:
                slices.remove(key)
                self._made.remove((slices, key))
            raise

    def expected(
        self, groups: Sequence[Sequence[ManagedParameter]]
    ) -> dict[Chunk, dict[str, torch.dtype]]:
        """Return the slices of state that can be foretold, there or not, and that had no room.

        The former are equal on all ranks.
        """
        found = {chunk: dict(slices) for chunk, slices in self._unplaced.items()}
        for group, records in zip(self._optimizer.param_groups, groups, strict=True):
            for record in records:
                slices = found.setdefault(record.chunk, {})
                for name, dtype in self._foretell(group, record).items():
                    slices[self._key_of(name, dtype)] = dtype
        return found

    def _foretell(self, group: dict[str, Any], record: ManagedParameter) -> dict[str, torch.dtype]:
        """Return the state that a parameter of a group will have, cut like it."""
        if record.chunk.own.state is None or not record.parameter.requires_grad:
            return {}
        options = {name: value for name, value in group.items() if name != "params"}
        dtype = record.chunk.own.update_dtype
        shape = _shape_of_probe(tuple(record.parameter.shape) if is_whole_atom(record) else (2,))
        key = (str(options), dtype, shape)
        if key not in self._foretold:
            self._foretold[key] = foretell(type(self._optimizer), options, dtype, shape)
        return self._foretold[key]

    @contextmanager
    def at_hand(self, chunk: Chunk, *, is_changed: bool = True) -> Generator[None]:
        """Inside, a chunk's pieces and their state have values; new state is kept on leaving."""
        slices = chunk.own.state
        with chunk.own.at_hand(is_changed=is_changed):
            if slices is None:
                yield
                return
            self._attach(chunk, slices)
            try:
                yield
                if is_changed:
                    self._adopt(chunk, slices)
            finally:
                self._detach(chunk, slices)

    def room_for(
        self, record: ManagedParameter, name: str, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return where a new state that is cut like its piece belongs; its chunk is at hand.

        Returns:
            A view of the slice of that name, None where the state stays on the accelerator.

        Raises:
            BudgetError: The slice is not there yet, and does not fit.
        """
        slices = record.chunk.own.state
        if slices is None:
            return None
        key = self._key_of(name, dtype)
        self._add(slices, key, dtype)
        return shape_piece(record, slices[key])

    def adopt(self, chunk: Chunk) -> None:
        """Take over state that was set from outside, all of it."""
        if chunk.own.state is None:
            return
        for record in chunk.records:
            self._away.pop(record, None)
        if any(self._optimizer.state.get(piece) for _, piece in self._pieces(chunk)):
            with self.at_hand(chunk):
                pass

    def repoint(self, chunk: Chunk) -> None:
        """Point state at slices that have moved to another tier; what is no slice goes along."""
        slices = chunk.own.state
        if slices is None:
            return
        if slices.is_in_memory:
            self._show(chunk, slices)
        else:
            self._detach(chunk, slices)
        beside = self._counted_beside()
        for record, piece in self._pieces(chunk):
            away, state = self._away.get(record, {}), self._optimizer.state.get(piece, {})
            for name, value in list(state.items()):
                if isinstance(value, torch.Tensor) and name not in away:
                    is_counter = name == "step" and piece not in beside
                    state[name] = value.to("cpu" if is_counter else piece.device)

    def _counted_beside(self) -> set[torch.Tensor]:
        """Return the pieces whose counters torch keeps beside them, not always on the CPU."""
        return {
            piece
            for group in self._optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for piece in group["params"]
        }

    def _attach(self, chunk: Chunk, slices: StateSlices) -> None:
        """Give pieces and state their values; entries that are gone stay gone."""
        if slices.is_in_memory:
            return
        if chunk.own.is_update_on_disk:
            for record, piece in self._pieces(chunk):
                piece.data = shape_piece(record, chunk.own.update_S)
        self._show(chunk, slices)

    def _show(self, chunk: Chunk, slices: StateSlices) -> None:
        """Let state be views of slices that are at hand; entries that are gone stay gone."""
        for record, piece in self._pieces(chunk):
            state = self._optimizer.state.get(piece, {})
            for name, key in list(self._away.get(record, {}).items()):
                if name in state:
                    state[name] = shape_piece(record, slices[key])
                else:
                    del self._away[record][name]

    def _adopt(self, chunk: Chunk, slices: StateSlices) -> None:
        """Move new state tensors that are cut like their piece into slices.

        The update that made them is over and cannot be refused any more: those that have no room
        stay in memory, and the next plan counts with them.
        """
        self._unplaced.pop(chunk, None)
        for record, piece in self._pieces(chunk):
            state = self._optimizer.state.get(piece, {})
            for name, value in list(state.items()):
                if not isinstance(value, torch.Tensor) or value.shape != piece.shape:
                    continue
                key = self._key_of(name, value.dtype)
                if not self._make_room(chunk, slices, key, value.dtype):
                    continue
                place = shape_piece(record, slices[key])
                if value.untyped_storage()._cdata != place.untyped_storage()._cdata:
                    assert value.numel() < 2 or 0 not in value.stride(), "a stand-in has no values"
                    place.copy_(value)
                    state[name] = place
                self._away.setdefault(record, {})[name] = key

    def _detach(self, chunk: Chunk, slices: StateSlices) -> None:
        """Leave stand-ins where values are about to go."""
        if slices.is_in_memory:
            return
        for record, piece in self._pieces(chunk):
            if chunk.own.is_update_on_disk:
                piece.data = stand_in(record, piece.dtype)
            state = self._optimizer.state.get(piece, {})
            for name, key in self._away.get(record, {}).items():
                if name in state:
                    state[name] = stand_in(record, slices.dtype(key))

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[ManagedParameter, nn.Parameter]]:
        """Yield what this rank's optimizer sees of a chunk."""
        for record in chunk.records:
            piece = self._piece_of(record)
            if piece is not None:
                yield record, piece

    def _key_of(self, name: str, dtype: torch.dtype) -> str:
        """Return the name of the slice of one kind of state of this optimizer."""
        return f"{id(self):x} {name} {str(dtype).removeprefix('torch.')}"

    def _make_room(self, chunk: Chunk, slices: StateSlices, key: str, dtype: torch.dtype) -> bool:
        """Make a slice for state that is there already; return False where there is no room."""
        try:
            self._add(slices, key, dtype)
        except BudgetError as error:
            logger.warning("new optimizer state stays in memory until a later step: %s", error)
            self._unplaced.setdefault(chunk, {})[key] = dtype
            return False
        return True

    def _add(self, slices: StateSlices, key: str, dtype: torch.dtype) -> bool:
        """Make a slice where there is none of that name; return whether there was none."""
        if key in slices:
            return False
        slices.add(key, dtype)
        self._made.append((slices, key))
        return True


def _give_back(made: list[tuple[StateSlices, str]]) -> None:
    """Free the slices of an optimizer that is gone."""
    for slices, key in made:
        slices.remove(key)
    made.clear()


def foretell(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> dict[str, torch.dtype]:
    """Return the state of one parameter after a step that is tried on a tiny one.

    Args:
        kind: Class of the optimizer.
        options: Of the parameter's group.
        dtype: Of the parameter.
        shape: Of the tiny one.

    Returns:
        The state tensors shaped like their parameter; none where the class cannot be tried.
    """
    if known_as(kind) not in STATE_PER_PARAMETER:
        return {}
    probe = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        make: Any = kind
        optimizer = make([{**options, "params": [probe]}])
        kind.step.__wrapped__(optimizer)  # type: ignore
    except Exception:  # options that only suit real parameters
        return {}
    state = optimizer.state.get(probe, {})
    return {
        name: value.dtype
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == probe.shape
    }


def _shape_of_probe(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tiny shape for which state is cut alike: 0 and 1 stay, other sizes differ."""
    return tuple(size if size < 2 else 2 + axis for axis, size in enumerate(shape))


def stand_in(record: ManagedParameter, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a piece's shape that takes no memory: NaN, expanded."""
    return torch.full((), torch.nan, dtype=dtype).expand(shape_of_piece(record))
