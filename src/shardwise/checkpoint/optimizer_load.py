"""Put stored state into an optimizer: options and scaling first, then tensors in place.

State tensors are made in the dtype and on the device that ``torch.optim`` gives loaded state, and
filled box by box from the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.entries import Part, part_of_whole_atom, parts_of_piece, whole
from shardwise.optimizer.pieces import is_whole_atom

if TYPE_CHECKING:
    from shardwise.checkpoint.optimizer_plan import OptimizerPlan
    from shardwise.checkpoint.source import Source
    from shardwise.checkpoint.state import TrainingState
    from shardwise.optimizer.binding import Member


def apply_optimizer(
    state: TrainingState, source: Source, plan: OptimizerPlan, facts: dict[str, Any]
) -> None:
    """Replace options, state and loss scaling of an optimizer. Collectives: none."""
    optimizer = state.optimizer
    assert optimizer is not None
    groups: list[dict[str, Any]] = []
    start = 0
    for options, members in zip(plan.groups, optimizer.anatomy.groups, strict=True):
        groups.append({**options, "params": list(range(start, start + len(members)))})
        start += len(members)
    inner = optimizer.anatomy.inner
    untouched = [t for t in map(optimizer.target, plan.untouched) if t is not None]
    kept = {target: inner.state[target] for target in untouched if target in inner.state}
    state.load_options({"state": {}, "param_groups": groups, "shardwise": facts})
    for target, own_state in kept.items():
        inner.state[target] = own_state
    parts: list[tuple[str, Part]] = []
    for options, members in zip(plan.groups, optimizer.anatomy.groups, strict=True):
        for member in members:
            target = optimizer.target(member)
            if target is None:
                continue
            own: dict[str, Any] = {}
            for key, stored in sorted(plan.states.get(member, {}).items()):
                if stored not in source.index.tensors:
                    _put(own, key, source.object(stored))
                    continue
                local = state.own_name(stored)
                if member.record is None and facts.get("world_size") == state.ranks.size:
                    stored = local if local in source.index.tensors else stored
                memory, boxes = _make(member, target, (key, stored), options, (source, plan))
                parts += [(stored, box) for box in boxes]
                _put(own, key, memory)
            if own:
                inner.state[target] = own
    source.fill_parts(parts)


def _make(
    member: Member,
    target: torch.Tensor,
    name: tuple[str, str],
    options: dict[str, Any],
    origin: tuple[Source, OptimizerPlan],
) -> tuple[torch.Tensor, list[Part]]:
    """Return the memory of one state tensor and the boxes to fill in it."""
    (key, stored), (source, plan) = name, origin
    known = source.index.tensors[stored]
    dtype, device = _kind(key, known.properties.dtype, target, options)
    shape, record = tuple(known.size), member.record
    is_scalar_like = member.parameter.numel() == 1 and key in plan.uncut
    is_cut = shape == tuple(member.parameter.shape) and not is_scalar_like
    if record is None or not is_cut:
        memory = torch.empty(shape, dtype=dtype, device=device)
        return memory, [whole((stored,), memory)]
    if 0 in target.stride():  # a stand-in for what rests on disk
        memory = torch.empty(target.shape, dtype=dtype, device=device)
    else:
        memory = torch.empty_like(target, dtype=dtype, device=device)
    if is_whole_atom(record):
        return memory, [part_of_whole_atom((stored,), record, memory)]
    return memory, parts_of_piece((stored,), record, memory)


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
