"""What a checkpoint has for an optimizer: group options by parameter name, and state by its name.

Groups are matched by the names of their members, so that groups in another order or number find
their options as long as members of one group were saved with the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.index import OPTIMIZER

if TYPE_CHECKING:
    from shardwise.checkpoint.optimizer_entries import OptimizerState
    from shardwise.checkpoint.plan import Problems
    from shardwise.checkpoint.source import Source
    from shardwise.optimizer.binding import Member

_SECTIONS = (OPTIMIZER, "optim.")
"""Where writers put an optimizer in a nested dict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlan:
    """Where options and state come from."""

    groups: list[dict[str, Any]]
    """Options of every group."""
    states: dict[Member, dict[str, str]]
    """Stored names of the state of every member, by the state's own."""
    untouched: list[Member]
    """Members that the checkpoint does not know: they keep their state."""
    uncut: frozenset[str]
    """States that are not shaped like their parameter, as larger parameters show."""


def plan_optimizer(
    optimizer: OptimizerState, source: Source, problems: Problems
) -> OptimizerPlan | None:
    """Return what a checkpoint has for an optimizer, and note what does not fit."""
    members = list(optimizer.members())
    by_name = {name: member for member in members for name in optimizer.names(member)}
    names = source.index.names
    heads = {s: (f"{s}state.", f"{s}param_groups.") for s in _SECTIONS}
    section = next((s for s in _SECTIONS if any(n.startswith(heads[s]) for n in names)), None)
    if section is None:
        problems.missing.append("the optimizer")
        return None
    saved = _saved_groups(source, section)
    groups = _match(optimizer, saved, problems)
    homes = {name for group in saved for name in group["params"]}
    states: dict[Member, dict[str, str]] = defaultdict(dict)
    for name in names:
        if name.startswith(f"{section}state."):
            owner, key = _split(name.removeprefix(f"{section}state."), by_name)
            if owner is None:
                problems.unexpected.append(name)
            else:
                states[by_name[owner]][key] = name
    for member in members:
        _check_shapes(member, states[member], source, problems)
    return OptimizerPlan(
        groups=groups,
        states=dict(states),
        untouched=[m for m in members if homes.isdisjoint(optimizer.names(m))],
        uncut=_uncut(states, source),
    )


def _saved_groups(source: Source, section: str) -> list[dict[str, Any]]:
    """Return all groups with names for members: from lists, or else from options by name."""
    prefix = f"{section}param_groups."
    options = [n.removeprefix(prefix) for n in source.index.names if n.startswith(prefix)]
    listed = {option.split(".")[0] for option in options if option.endswith(".params")}
    numbers = sorted(int(one) for one in listed if one.isdigit())
    if numbers:
        return [
            {
                option.removeprefix(f"{number}."): source.value(prefix + option)
                for option in options
                if option.startswith(f"{number}.") and option.count(".") == 1
            }
            for number in numbers
        ]
    by_name: dict[str, dict[str, Any]] = defaultdict(dict)
    for option in options:
        name, _, key = option.rpartition(".")
        by_name[name][key] = source.value(prefix + option)
    return [{**group, "params": [name]} for name, group in by_name.items()]


def _match(
    optimizer: OptimizerState, saved: list[dict[str, Any]], problems: Problems
) -> list[dict[str, Any]]:
    """Return the options of every group, its present ones where nothing was saved."""
    home = {name: group for group in saved for name in group["params"]}
    matched: list[dict[str, Any]] = []
    found: set[str] = set()
    shown = zip(optimizer.anatomy.inner.param_groups, optimizer.anatomy.groups, strict=True)
    for number, (group, members) in enumerate(shown):
        homes: list[dict[str, Any]] = []
        for member in members:
            name = next((n for n in optimizer.names(member) if n in home), None)
            if name is None:
                problems.missing.append(f"options of {optimizer.names(member)[0]}")
            else:
                found.add(name)
                homes.append(home[name])
        if not members and number < len(saved) and not saved[number]["params"]:
            homes = [saved[number]]
        options = [{k: v for k, v in one.items() if k != "params"} for one in homes]
        if any(not _are_equal(one, options[0]) for one in options[1:]):
            problems.wrong.append(
                f"group {number} of parameters that were saved with other options"
            )
        present = {k: v for k, v in group.items() if k != "params"}
        kept = options[0] if options else present
        # another kind of optimizer has others
        lacking = optimizer.anatomy.inner.defaults.keys() - kept.keys()
        problems.missing += [f"option {name} of group {number}" for name in lacking]
        matched.append({name: present[name] for name in lacking} | kept)
    problems.unexpected += [f"options of {name}" for name in home.keys() - found]
    return matched


def _split(rest: str, by_name: dict[str, Member]) -> tuple[str | None, str]:
    """Split ``<parameter>.<state>`` where the parameter is known; both may have dots."""
    parts = rest.split(".")
    for number in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:number])
        if name in by_name:
            return name, ".".join(parts[number:])
    return None, rest


def _check_shapes(
    member: Member, states: dict[str, str], source: Source, problems: Problems
) -> None:
    """Refuse state of a parameter of another shape, as far as the state shows it."""
    shape = tuple(member.parameter.shape)
    for key in ("exp_avg", "momentum_buffer"):
        stored = source.index.shape(states[key]) if key in states else None
        if stored is not None and stored != shape:
            problems.wrong.append(f"{states[key]!r} of shape {stored} for {shape}")


def _uncut(states: dict[Member, dict[str, str]], source: Source) -> frozenset[str]:
    """Return the names of states that larger parameters show to have shapes of their own."""
    names = {"step"}
    for member, own in states.items():
        if member.parameter.numel() > 1:
            shape = tuple(member.parameter.shape)
            names.update(
                key
                for key, stored in own.items()
                if source.index.shape(stored) not in (None, shape)
            )
    return frozenset(names)


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two groups have the same options, tensors among them."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key])
        if isinstance(value, torch.Tensor) and isinstance(other[key], torch.Tensor)
        else value == other[key]
        for key, value in one.items()
    )
