"""Translate optimizer state between the pieces of this rank and whole tensors of plain torch.

Whole state is keyed by parameter index over all groups, as ``torch.optim`` does, whatever the world
size. A state tensor shaped like its piece is cut like the parameter; any other value (a step
counter) is the same on every owner.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigurationError, mismatch
from shardwise.optimizer.pieces import is_whole_atom

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.optimizer.binding import Binding, Member
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.loss_scaling import LossScaler
    from shardwise.runtime.managed import ManagedParameter

EXTRA_KEY = "shardwise"


@dataclass(frozen=True, slots=True)
class _Cut:
    """A state tensor that is cut like its parameter."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Same:
    """A state value that every owner has."""

    value: Any


_Entry = dict[str, "_Cut | _Same"]


class StateExchange:
    """Gathers and cuts the state of one optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, binding: Binding, scaler: LossScaler | None
    ) -> None:
        """Serve one optimizer."""
        self._optimizer = optimizer
        self._binding = binding
        self._scaler = scaler
        self._members = list(binding.members())
        self._index = {m.record: i for i, m in enumerate(self._members) if m.record is not None}

    # ------------------------------------------------------------------ pieces to whole

    def full(self) -> dict[str, Any]:
        """Return the whole state dict. Collectives: see ``_entries`` and ``_gather_chunk``."""
        unordered = {i: state for part in self._parts() for i, state in part.items()}
        result: dict[str, Any] = {
            "state": {i: unordered[i] for i in sorted(unordered)},
            "param_groups": self._groups(),
        }
        extra: dict[str, Any] = {}
        if self._scaler is not None:
            extra["loss_scaler"] = self._scaler.state_dict()
        masters = self._masters()
        if masters:
            extra["masters"] = masters
        if extra:
            result[EXTRA_KEY] = extra
        return result

    def in_shards(self, max_bytes: int) -> Iterator[dict[int, dict[str, Any]]]:
        """Yield whole state in parts of at most ``max_bytes`` unless one parameter is larger."""
        shard: dict[int, dict[str, Any]] = {}
        used = 0
        for part in self._parts():
            for index, state in part.items():
                need = _num_bytes(state)
                if shard and used + need > max_bytes:
                    yield shard
                    shard, used = {}, 0
                shard[index] = state
                used += need
        if shard:
            yield shard

    def _parts(self) -> Iterator[dict[int, dict[str, Any]]]:
        """Yield whole state chunk by chunk, then that of parameters left out of sharding."""
        for engine in self._binding.engines():
            entries = self._entries(engine)
            for chunk in engine.chunks:
                yield self._gather_chunk(chunk, entries)
        yield {
            index: {name: _to_cpu(value) for name, value in state.items()}
            for index, member in enumerate(self._members)
            if member.record is None
            and (state := self._optimizer.state.get(member.parameter)) is not None
        }

    def _entries(self, engine: Engine) -> dict[int, _Entry]:
        """Agree on which state exists. Collectives: one exchange of small objects."""
        mine: dict[int, _Entry] = {}
        for record, index in self._index.items():
            piece = self._binding.piece(record)
            state = self._optimizer.state.get(piece) if piece is not None else None
            if record.engine is not engine or not state:
                continue
            # what no cut goes through is described by its values
            needs_values = is_whole_atom(record)
            with (
                self._binding.resting.at_hand(record.chunk, is_changed=False)
                if needs_values
                else nullcontext()
            ):
                mine[index] = {k: self._describe(record, value) for k, value in state.items()}
        axis = engine.topology.shard
        everyone: list[dict[int, _Entry]] = [mine]
        if axis.group is not None:
            everyone = [{} for _ in range(axis.size)]
            dist.all_gather_object(everyone, mine, group=axis.group)
        merged: dict[int, _Entry] = {}
        for entries in everyone:
            for index, entry in entries.items():
                known = merged.setdefault(index, {})
                for name, kind in entry.items():
                    # a piece of one element makes a counter look cut: larger pieces know better
                    if name not in known or isinstance(kind, _Same):
                        known.setdefault(name, kind)
                        if isinstance(known[name], _Cut):
                            known[name] = kind
        return dict(sorted(merged.items()))

    def _describe(self, record: ManagedParameter, value: object) -> _Cut | _Same:
        """Say what kind of state a value is."""
        assert record.piece is not None
        is_cut = (
            isinstance(value, torch.Tensor)
            and not is_whole_atom(record)
            and tuple(value.shape) == (record.piece.numel,)
        )
        if isinstance(value, torch.Tensor) and is_cut:
            return _Cut(value.dtype)
        return _Same(_to_cpu(value))

    def _gather_chunk(self, chunk: Chunk, entries: dict[int, _Entry]) -> dict[int, dict[str, Any]]:
        """Return the whole state of one chunk's parameters, on the CPU.

        Collectives: one all-gather per cut state name and dtype.
        """
        indices = {r: self._index[r] for r in chunk.records if self._index.get(r) in entries}
        whole: dict[int, dict[str, Any]] = {index: {} for index in indices.values()}
        kinds = sorted(
            {
                (name, kind.dtype)
                for index in indices.values()
                for name, kind in entries[index].items()
                if isinstance(kind, _Cut)
            },
            key=str,
        )
        with self._binding.resting.at_hand(chunk, is_changed=False):
            gathered = {kind: self._gather_state(chunk, indices, *kind) for kind in kinds}
        counters = _one_element_counters(entries)
        for record, index in indices.items():
            for name, kind in entries[index].items():
                if isinstance(kind, _Same):
                    whole[index][name] = kind.value
                else:
                    view = record.view_in(gathered[name, kind.dtype])
                    is_counter = record.numel == 1 and name in counters
                    shaped = view.reshape(1) if is_counter else view.contiguous()
                    whole[index][name] = shaped.cpu().clone()
        return whole

    def _gather_state(
        self, chunk: Chunk, indices: dict[ManagedParameter, int], name: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return one state of one chunk from all ranks, [C]. Collectives: one all-gather."""
        slice_S = torch.zeros(chunk.own.numel, dtype=dtype, device=chunk.own.state_device)
        for record in indices:
            piece = self._binding.piece(record)
            value = self._optimizer.state.get(piece, {}).get(name) if piece is not None else None
            out = record.piece_in(slice_S)
            if out is not None and isinstance(value, torch.Tensor) and value.dtype == dtype:
                out.copy_(value)
        return chunk.records[0].engine.gather(chunk, slice_S)

    def _masters(self) -> dict[int, torch.Tensor]:
        """Return whole float32 masters by index. Collectives: one all-gather per chunk."""
        masters: dict[int, torch.Tensor] = {}
        for engine in self._binding.engines():
            for chunk in engine.chunks:
                is_foreign = self._index.keys().isdisjoint(chunk.records)
                if is_foreign or not chunk.own.has_exact_master:
                    continue
                buffer_C = engine.gather_update(chunk)
                for record in chunk.records:
                    if record in self._index:
                        view = record.view_in(buffer_C)
                        masters[self._index[record]] = view.contiguous().cpu().clone()
        return dict(sorted(masters.items()))

    def _groups(self) -> list[dict[str, Any]]:
        """Return all groups with indices for parameters."""
        groups: list[dict[str, Any]] = []
        start = 0
        for group, members in zip(self._optimizer.param_groups, self._binding.groups, strict=True):
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = list(range(start, start + len(members)))
            groups.append(packed)
            start += len(members)
        return groups

    # ------------------------------------------------------------------ whole to pieces

    def localise(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what the wrapped optimizer loads on this rank; changes nothing.

        Raises:
            ConfigurationError: Groups or shapes do not match.
        """
        saved_groups = state_dict.get("param_groups")
        if saved_groups is None or "state" not in state_dict:
            raise _bad_state("state dict", "keys 'state' and 'param_groups'", list(state_dict))
        sizes = [len(group["params"]) for group in saved_groups]
        own = [len(members) for members in self._binding.groups]
        if sizes != own:
            raise _bad_state("param_groups", f"groups of {own} parameters", sizes)
        ids = [index for group in saved_groups for index in group["params"]]
        states = [_local(state_dict["state"].get(saved)) for saved in ids]
        for member, state in zip(self._members, states, strict=True):
            _check_state(member, state)
        self._check_masters(state_dict.get(EXTRA_KEY, {}).get("masters", {}))
        uncut = _uncut_names(self._members, states)
        local_state: dict[int, dict[str, Any]] = {}
        local_groups: list[dict[str, Any]] = []
        position = number = 0
        for saved, members in zip(saved_groups, self._binding.groups, strict=True):
            params: list[int] = []
            for member in members:
                state = states[position]
                position += 1
                if member.record is not None and member.record.piece is None:
                    continue
                if state is not None:
                    local_state[number] = {
                        k: _copy(v)
                        if member.parameter.numel() == 1 and k in uncut
                        else _cut(member, v)
                        for k, v in state.items()
                    }
                params.append(number)
                number += 1
            local_groups.append({**saved, "params": params})
        return {"state": local_state, "param_groups": local_groups}

    def finish_load(self, masters: dict[int, torch.Tensor]) -> None:
        """Move what was loaded to where it rests, and take exact masters. Collectives: none.

        Working values become what the masters round to.
        """
        for engine in self._binding.engines():
            for chunk in engine.chunks:
                self._binding.resting.adopt(chunk)
        for index, whole in masters.items():
            record = self._members[index].record
            if record is None or not record.chunk.own.has_exact_master:
                continue
            record.engine.values.write(record, whole)

    def _check_masters(self, masters: dict[int, torch.Tensor]) -> None:
        """Refuse masters of other parameters."""
        for index, whole in masters.items():
            if not 0 <= index < len(self._members):
                raise _bad_state("masters", f"indices below {len(self._members)}", index)
            expected = tuple(self._members[index].parameter.shape)
            if tuple(whole.shape) != expected:
                raise _bad_state(f"masters[{index}]", f"shape {expected}", tuple(whole.shape))


def _local(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return one parameter's state with the parts on this rank in place of DTensors."""
    if state is None:
        return None
    return {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def _bad_state(what: str, expected: object, got: object) -> ConfigurationError:
    """Return the error for a state that does not fit."""
    return ConfigurationError(
        mismatch(
            what, expected=expected, got=got, fix="load the state of an optimizer over these groups"
        )
    )


def _check_state(member: Member, state: dict[str, Any] | None) -> None:
    """Refuse state tensors that belong to a parameter of another shape."""
    record = member.record
    if state is None or record is None or is_whole_atom(record):
        return
    for name, value in state.items():
        fits = (
            not isinstance(value, torch.Tensor)
            or value.numel() == 1
            or tuple(value.shape) == tuple(record.shape)
        )
        if not fits:
            raise _bad_state(
                f"state {name!r} of parameter {record.name!r}",
                f"shape {tuple(record.shape)}",
                tuple(value.shape),
            )


def _one_element_counters(entries: dict[int, _Entry]) -> set[str]:
    """Return the names of states that larger parameters show to be counters of shape (1,)."""
    return {
        name
        for entry in entries.values()
        for name, kind in entry.items()
        if isinstance(kind, _Same)
        and isinstance(kind.value, torch.Tensor)
        and tuple(kind.value.shape) == (1,)
    }


def _uncut_names(members: Sequence[Member], states: Sequence[dict[str, Any] | None]) -> set[str]:
    """Return the names of states that are not cut, which a 0-dim parameter's shape cannot tell."""
    names = {"step"}
    for member, state in zip(members, states, strict=True):
        if state is not None and member.parameter.numel() > 1:
            names.update(
                name
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.shape != member.parameter.shape
            )
    return names


def _cut(member: Member, value: Any) -> Any:  # noqa: ANN401 - any state value
    """Return the part of a whole state value that belongs to this rank's piece."""
    record = member.record
    if not isinstance(value, torch.Tensor):
        return value
    if record is None or is_whole_atom(record) or tuple(value.shape) != tuple(record.shape):
        return value.clone()
    piece = record.cut(value)
    assert piece is not None
    return piece.clone()


def _copy(value: Any) -> Any:  # noqa: ANN401 - any state value
    """Return a copy of a value where it lies."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _to_cpu(value: Any) -> Any:  # noqa: ANN401 - any state value
    """Return a copy of a value on the CPU."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _num_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of the tensors of one parameter's state."""
    return sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, torch.Tensor))
