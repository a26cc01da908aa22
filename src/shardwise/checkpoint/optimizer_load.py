"""Put stored state into an optimizer: options and scaling first, then tensors in place.

State tensors are made in the dtype and on the device that ``torch.optim`` gives loaded state, and
filled box by box from the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.data_file import file_of
from shardwise.checkpoint.entries import Part, part_of_whole_atom, parts_of_piece, whole
from shardwise.checkpoint.state import ABSENT, own_name
from shardwise.optimizer.pieces import is_whole_atom

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.checkpoint.optimizer_plan import OptimizerPlan
    from shardwise.checkpoint.source import Source
    from shardwise.checkpoint.state import TrainingState
    from shardwise.optimizer.binding import Member
    from shardwise.runtime.managed import ManagedParameter


class Rooms:
    """Where loaded state of one optimizer goes, made when it is asked for."""

    def __init__(
        self, state: TrainingState, source: Source, plan: OptimizerPlan, *, prefers_own: bool
    ) -> None:
        """Serve one load.

        Args:
            state: What is loaded into; it has an optimizer.
            source: The checkpoint.
            plan: What it has for the optimizer.
            prefers_own: Its ranks are these, so what each had apart is taken from its own entries.
        """
        assert state.optimizer is not None
        self._state = state
        self._optimizer = state.optimizer
        self._source = source
        self._plan = plan
        self._untouched = frozenset(plan.untouched)
        self._prefers_own = prefers_own
        absent = state.own_name(ABSENT)
        self._absent: frozenset[str] = frozenset(
            source.object(absent) if prefers_own and absent in source.index.names else ()
        )
        self._held: dict[torch.Tensor, dict[str, Any]] = {}
        """State that was there: its memory is used again, since new memory costs as much."""
        self._taken: set[int] = set()
        """Addresses of what is used again, once each."""

    def take_options(self, facts: dict[str, Any]) -> None:
        """Replace options of groups and loss scaling, and empty what will be loaded.

        Collectives: none.
        """
        groups: list[dict[str, Any]] = []
        start = 0
        for options, members in zip(self._plan.groups, self._optimizer.anatomy.groups, strict=True):
            groups.append({**options, "params": list(range(start, start + len(members)))})
            start += len(members)
        inner = self._optimizer.anatomy.inner
        self._held = {target: dict(own) for target, own in inner.state.items()}
        self._state.load_options({"state": {}, "param_groups": groups, "shardwise": facts})

    def make(self, has: Callable[[ManagedParameter | None], bool]) -> list[tuple[str, Part]]:
        """Make the state of some members, and return the boxes to fill in it.

        Args:
            has: Which members, by their record, are at hand.

        Raises:
            BudgetError: State rests elsewhere, and has no room there.
        """
        parts: list[tuple[str, Part]] = []
        inner = self._optimizer.anatomy.inner
        for options, members in zip(self._plan.groups, self._optimizer.anatomy.groups, strict=True):
            for member in members:
                target = self._optimizer.target(member)
                if target is None or not has(member.record):
                    continue
                own = self._kept(member, target)
                for key, stored in sorted(self._plan.states.get(member, {}).items()):
                    if member.record is None and self._is_absent(stored):
                        continue
                    value, boxes = self._make(member, target, (key, stored), options)
                    parts += boxes
                    _put(own, key, value)
                if own:
                    inner.state[target] = own
        return parts

    def _is_absent(self, stored: str) -> bool:
        """Return whether this rank lacked a state of a member that every rank holds whole."""
        has_own = self._state.own_name(stored) in self._source.index.names
        if not self._prefers_own or has_own:
            return False
        # where the first rank lacked it, every rank that had it has written it as its own too
        first = self._source.writer_of(stored)
        others = (r for r in range(1, self._state.ranks.size) if first == file_of(r))
        is_of_another = any(own_name(rank, stored) in self._source.index.names for rank in others)
        return stored in self._absent or is_of_another

    def _kept(self, member: Member, target: torch.Tensor) -> dict[str, Any]:
        """Return the state of a member that the checkpoint does not know, none of others."""
        own = dict(self._held.get(target, {})) if member in self._untouched else {}
        for key, value in own.items():
            is_cut = isinstance(value, torch.Tensor) and value.shape == target.shape
            if is_cut and member.record is not None:
                own[key] = self._rest(member.record, key, value.dtype, otherwise=value)
        return own

    def _make(
        self,
        member: Member,
        target: torch.Tensor,
        name: tuple[str, str],
        options: dict[str, Any],
    ) -> tuple[Any, list[tuple[str, Part]]]:
        """Return one entry of the state, and the boxes to fill in it."""
        (key, stored), source, record = name, self._source, member.record
        if record is None and self._prefers_own:
            own = self._state.own_name(stored)
            stored = own if own in source.index.names else stored
        if stored not in source.index.tensors:
            return source.object(stored), []
        known = source.index.tensors[stored]
        dtype, device = _kind(key, known.properties.dtype, target, options)
        shape = tuple(known.size)
        is_scalar_like = member.parameter.numel() == 1 and key in self._plan.uncut
        is_cut = shape == tuple(member.parameter.shape) and not is_scalar_like
        if record is None or not is_cut:
            memory = torch.empty(shape, dtype=dtype, device=device)
            return memory, [(stored, whole((stored,), memory))]
        memory = self._room(
            record, target, key, torch.empty_like(target, dtype=dtype, device="meta")
        )
        if is_whole_atom(record):
            return memory, [(stored, part_of_whole_atom((stored,), record, memory))]
        return memory, [(stored, part) for part in parts_of_piece((stored,), record, memory)]

    def _room(
        self, record: ManagedParameter, target: torch.Tensor, key: str, like: torch.Tensor
    ) -> torch.Tensor:
        """Return memory for state that is cut like its piece: where it rests, or as it was."""
        place = self._rest(record, key, like.dtype)
        if place is not None:
            return place
        held = self._held.get(target, {}).get(key)
        if isinstance(held, torch.Tensor) and _suits(held, like, target.device):
            address = held.data_ptr()
            if address not in self._taken:
                self._taken.add(address)
                return held
        return torch.empty_like(like, device=target.device)

    def _rest(
        self,
        record: ManagedParameter,
        key: str,
        dtype: torch.dtype,
        otherwise: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Return where a state rests, with what is there, if it is not on the accelerator."""
        binding = self._optimizer.anatomy.binding
        place = None if binding is None else binding.resting.room_for(record, key, dtype)
        return otherwise if place is None else place


def _suits(held: torch.Tensor, like: torch.Tensor, device: torch.device) -> bool:
    """Return whether memory can be used again: of the same kind, every element its own."""
    is_same = held.shape == like.shape and held.stride() == like.stride()
    is_free = not held.requires_grad and not held.is_inference()
    is_alone = held.is_contiguous() and held.numel() > 0 and is_free
    return is_same and is_alone and held.dtype == like.dtype and held.device == device


def _kind(
    key: str, saved: torch.dtype, target: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.dtype, torch.device]:
    """Return dtype and device of loaded state, by the rules of ``torch.optim.Optimizer``."""
    if key == "step":
        if options.get("capturable") or options.get("fused"):
            return torch.float32, target.device
        return saved, torch.device("cpu")
    is_cast = target.is_floating_point()
    return (target.dtype if is_cast else saved), target.device


def _put(own: dict[str, Any], key: str, value: object) -> None:
    """Store a state under its name, in nested dicts where the name has dots."""
    *outer, last = key.split(".")
    for part in outer:
        own = own.setdefault(part, {})
    own[last] = value
