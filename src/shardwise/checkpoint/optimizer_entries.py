"""The state of one optimizer on this rank, by the names of torch's ``get_optimizer_state_dict``.

Three kinds of state: *cut* like the parameter (moments), the *same* on every owner (counters), and
objects. A state tensor is cut if it has the shape of its piece; for a piece of one element a
counter of shape (1,) has that too, so the ranks tell each other what larger pieces show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.entries import (
    Entry,
    Part,
    Thing,
    encode,
    part_of_whole_atom,
    parts_of_piece,
    whole,
    writes,
)
from shardwise.checkpoint.index import GROUPS, STATE
from shardwise.errors import CheckpointError, mismatch
from shardwise.optimizer.anatomy import Anatomy, anatomy_of
from shardwise.optimizer.pieces import is_whole_atom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from shardwise.checkpoint.contents import Contents
    from shardwise.optimizer.binding import Member
    from shardwise.runtime.managed import ManagedParameter


class OptimizerState:
    """What one optimizer holds on this rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, contents: Contents) -> None:
        """Name the members.

        Raises:
            CheckpointError: A member is no parameter of the model, or needs a ``ShardedOptimizer``.
        """
        self.anatomy: Anatomy = anatomy_of(optimizer)
        self._contents = contents
        for group in self.anatomy.groups:
            for member in group:
                self._check(member)

    def _check(self, member: Member) -> None:
        """Refuse members that have no name, or whose state this optimizer does not know."""
        named = self._contents.by_tensor.get(member.parameter)
        if named is None:
            raise CheckpointError(
                mismatch(
                    "optimizer",
                    expected="parameters of the model",
                    got=f"one of shape {tuple(member.parameter.shape)} that it does not have",
                    fix="pass the optimizer (the ShardedOptimizer, where there is one) and the "
                    "model that belong together",
                )
            )
        if named.record is not None and member.record is None:
            raise CheckpointError(
                mismatch(
                    "optimizer",
                    expected="a ShardedOptimizer, since the model is sharded",
                    got=type(self.anatomy.inner).__name__,
                    fix="wrap it in shardwise.ShardedOptimizer",
                )
            )

    def names(self, member: Member) -> tuple[str, ...]:
        """Return the names of a member."""
        return self._contents.by_tensor[member.parameter].names

    def members(self) -> Iterator[Member]:
        """Yield the members of all groups."""
        for group in self.anatomy.groups:
            yield from group

    def target(self, member: Member) -> nn.Parameter | None:
        """Return what the optimizer sees of a member on this rank, None if it sees nothing."""
        if member.record is None or self.anatomy.binding is None:
            return member.parameter
        return self.anatomy.binding.piece(member.record)

    # ------------------------------------------------------------------ saving

    def counters(self) -> set[str]:
        """Return names of states of shape (1,) that larger pieces show not to be cut."""
        return {
            name
            for member, state in self._states()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
            and tuple(value.shape) == (1,)
            and _num_owned(member) != 1
        }

    def left_out(self) -> list[Entry]:
        """Return the state of members that every rank holds whole."""
        entries: list[Entry] = []
        for member, state in self._states():
            for key, value in state.items() if member.record is None else ():
                name = self._state_name(member, key)
                if isinstance(value, torch.Tensor):
                    entries.append(whole((name,), value))
                else:
                    entries.append(Thing(names=(name,), data=encode(name, value)))
        return entries

    def entries(
        self, counters: set[str], has: Callable[[ManagedParameter | None], bool]
    ) -> Iterator[Entry]:
        """Yield what this rank holds a part of, and writes; see ``left_out`` for the rest.

        Args:
            counters: Union of ``counters()`` of all ranks.
            has: Which members, by their record, have values now; others are passed over.
        """
        for member, state in self._states():
            record = member.record
            if record is None or not has(record) or not writes(record):
                continue
            is_first = record.piece is None or record.piece.parameter_start == 0
            for name, value in state.items():
                names = (self._state_name(member, name),)
                if isinstance(value, torch.Tensor):
                    yield from _parts(names, member, value, is_counter=name in counters)
                elif is_first:
                    yield Thing(names=names, data=encode(names[0], value))

    def groups(self) -> Iterator[Thing]:
        """Yield the options of every group, under all names that readers may look for."""
        taken: set[str] = set()
        shown = zip(self.anatomy.inner.param_groups, self.anatomy.groups, strict=True)
        for number, (group, members) in enumerate(shown):
            own = [self.names(member)[0] for member in members]
            for option, value in {**group, "params": own}.items():
                names = [f"{GROUPS}{number}.{option}"]
                if option != "params":
                    names += [f"{GROUPS}{name}.{option}" for name in own]
                names = [name for name in names if name not in taken]
                taken.update(names)
                yield Thing(names=tuple(names), data=encode(names[0], value))

    def _states(self) -> Iterator[tuple[Member, dict[str, Any]]]:
        """Yield members that have state on this rank."""
        for member in self.members():
            target = self.target(member)
            state = None if target is None else self.anatomy.inner.state.get(target)
            if state:
                yield member, state

    def _state_name(self, member: Member, name: str) -> str:
        """Return how a state is called."""
        return f"{STATE}{self.names(member)[0]}.{name}"


def _num_owned(member: Member) -> int:
    """Return how many elements of a member this rank's optimizer sees."""
    record = member.record
    if record is None or record.piece is None:
        return member.parameter.numel()
    return record.piece.numel


def _parts(
    names: tuple[str, ...], member: Member, value: torch.Tensor, *, is_counter: bool
) -> list[Part]:
    """Return the boxes of one state tensor of a sharded member that this rank writes."""
    record = member.record
    assert record is not None
    assert record.piece is not None
    shape = tuple(value.shape)
    if is_whole_atom(record):
        if shape == tuple(record.shape):
            return [part_of_whole_atom(names, record, value)]
    elif shape == (record.piece.numel,) and not (is_counter and shape == (1,)):
        return parts_of_piece(names, record, value)
    if isinstance(record.parameter, DTensor) and value.ndim:
        raise CheckpointError(
            mismatch(
                f"{names[0]!r}",
                expected="a state of the parameter's shape, since other ranks hold other parts",
                got=f"shape {shape}",
                fix="use an optimizer whose state follows its parameters",
            )
        )
    return [whole(names, value)] if record.piece.parameter_start == 0 else []
