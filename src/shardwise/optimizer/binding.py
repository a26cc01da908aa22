"""Which parameters an optimizer updates, and the pieces that stand for them in its groups.

Every group keeps its dict (schedulers write to it); only ``group["params"]`` changes: it holds the
pieces that this rank owns, in the order of the parameters, and parameters that are not sharded.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.errors import ConfigurationError, mismatch
from shardwise.optimizer.pieces import shape_piece
from shardwise.optimizer.resting import RestingState, stand_in
from shardwise.runtime.divergence import explain
from shardwise.runtime.managed import ManagedParameter, record_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine import Engine


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One parameter of one group."""

    parameter: nn.Parameter
    record: ManagedParameter | None
    """None for a parameter that was left out of sharding: it is updated whole, on this rank."""


class Binding:
    """The members of every group, in the order of the original optimizer, and their pieces."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the groups; ``refresh`` exchanges parameters for pieces."""
        self._optimizer = optimizer
        self.groups: list[list[Member]] = []
        self._pieces: dict[ManagedParameter, nn.Parameter] = {}
        self._plans: dict[Chunk | None, list[list[nn.Parameter]]] = {}
        self._served: set[Engine] = set()
        self.resting = RestingState(optimizer, self.piece)

    def add_group(self, parameters: list[nn.Parameter]) -> None:
        """Bind the parameters of the next group."""
        self.groups.append([Member(p, record_of(p)) for p in parameters])

    def claim(self) -> None:
        """Say that an optimizer updates all members."""
        for record in self.records():
            record.is_claimed = True
        for engine in self.engines():
            if engine.adaptation is not None:
                engine.adaptation.followers.add(self)

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """Look into slices that have moved."""
        self.refresh()
        for chunk in chunks:
            self.resting.repoint(chunk)

    def members(self) -> Iterator[Member]:
        """Yield every parameter in index order (the order of a plain state dict)."""
        for group in self.groups:
            yield from group

    def records(self) -> list[ManagedParameter]:
        """Return the records of all sharded members."""
        return [m.record for m in self.members() if m.record is not None]

    def left_out(self) -> list[nn.Parameter]:
        """Return the members that are not sharded."""
        return [m.parameter for m in self.members() if m.record is None]

    def engines(self) -> list[Engine]:
        """Return the engines of all members, in order of first appearance."""
        return list({record.engine: None for record in self.records()})

    def serve(self, face: object) -> None:
        """Keep the engines at work as long as ``face`` lives."""
        for engine in self.engines():
            if engine not in self._served:
                self._served.add(engine)
                engine.serve(face)

    def reserve_state(self) -> None:
        """Take room for state that will rest elsewhere: see ``RestingState.reserve``."""
        self.resting.reserve(self._grouped_records(), self.engines())

    def expected_state(self) -> dict[Chunk, dict[str, torch.dtype]]:
        """Return the slices of state that updates have or will make, as far as can be known."""
        return self.resting.expected(self._grouped_records())

    def _grouped_records(self) -> list[list[ManagedParameter]]:
        """Return the sharded members of every group."""
        return [[m.record for m in members if m.record is not None] for members in self.groups]

    @contextmanager
    def during(self, task: str) -> Generator[None]:
        """Name the call of the user that communicates inside, should ranks fail to meet there."""
        with ExitStack() as stack:
            for engine in self.engines():
                stack.enter_context(engine.whereabouts.during(task))
                stack.enter_context(explain(engine.whereabouts))
                engine.whereabouts.note("exchange of names")
            yield

    def piece(self, record: ManagedParameter) -> nn.Parameter | None:
        """Return what the optimizer sees of a parameter on this rank."""
        return self._pieces.get(record)

    def refresh(self) -> None:
        """Make pieces where they are missing or their slice was replaced, and set the groups."""
        state = self._optimizer.state
        for record in self.records():
            if record.piece is None:
                self._pieces.pop(record, None)
                continue
            known, own = self._pieces.get(record), record.chunk.own
            if not own.is_update_at_hand:
                values = stand_in(record, own.update_dtype)
                if known is None:
                    self._pieces[record] = nn.Parameter(values)
                else:
                    known.data = values
                continue
            storage = own.update_S.untyped_storage()._cdata
            if known is not None and known.untyped_storage()._cdata == storage:
                continue
            piece = nn.Parameter(shape_piece(record, own.update_S).detach())
            self._pieces[record] = piece
            if known is not None and known in state:
                state[piece] = state.pop(known)
        self._plans = {}
        for number, members in enumerate(self.groups):
            visible: list[nn.Parameter] = []
            for member in members:
                record = member.record
                tensor = member.parameter if record is None else self._pieces.get(record)
                if tensor is not None:
                    visible.append(tensor)
                    chunk = None if record is None else record.chunk
                    plan = self._plans.setdefault(chunk, [[] for _ in self.groups])
                    plan[number].append(tensor)
            self._optimizer.param_groups[number]["params"] = visible

    def visible_in(self, chunk: Chunk) -> list[list[nn.Parameter]]:
        """Return, per group, what the optimizer sees of one chunk."""
        return self._plans.get(chunk, [[] for _ in self.groups])

    def visible_left_out(self) -> list[list[nn.Parameter]]:
        """Return, per group, what is not sharded."""
        return self._plans.get(None, [[] for _ in self.groups])


def check_members(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """Return the parameters of every group, or refuse groups that cannot be bound."""
    groups: list[list[nn.Parameter]] = []
    seen: set[torch.Tensor] = set()
    for number, group in enumerate(optimizer.param_groups):
        members = list(group["params"])
        for parameter in members:
            if not isinstance(parameter, nn.Parameter):
                raise ConfigurationError(
                    mismatch(
                        f"param_groups[{number}]",
                        expected="nn.Parameter objects",
                        got=f"a {type(parameter).__name__} of shape {tuple(parameter.shape)}",
                        fix="make it an nn.Parameter of the model",
                    )
                )
            if parameter in seen:
                raise ConfigurationError(
                    mismatch(
                        f"param_groups[{number}]",
                        expected="every parameter once",
                        got=f"one of shape {tuple(parameter.shape)} a second time",
                        fix="list each parameter in one group",
                    )
                )
            seen.add(parameter)
        groups.append(members)
    return groups
