"""What a checkpoint has for a model: which stored name goes where, and what does not fit.

Pure comparison of names and shapes; nothing is read but the index, nothing is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwise.checkpoint.index import OF_OPTIMIZER
from shardwise.checkpoint.state import FACTS, OURS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.checkpoint.contents import Named
    from shardwise.checkpoint.index import Index
    from shardwise.checkpoint.state import TrainingState

_PREFIXES = ("", "model.")
"""Where other writers put the model: at the top, or as one entry of a nested dict."""
_NEIGHBOURS = ("optim.", "lr_scheduler", "dataloader", "train_state")
"""What other writers put beside it."""
_NUM_SHOWN = 5


@dataclass(slots=True)
class Problems:
    """What does not fit."""

    missing: list[str] = field(default_factory=list)
    """In the model, not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint, not in the model."""
    wrong: list[str] = field(default_factory=list)
    """Refused in any case."""

    def say(self, *, strict: bool) -> str | None:
        """Return what is refused in one line, None if all is well."""
        found = list(self.wrong[:_NUM_SHOWN])
        if strict:
            for what, names in (("missing", self.missing), ("unexpected", self.unexpected)):
                if names:
                    rest = len(names) - _NUM_SHOWN
                    shown = ", ".join(repr(name) for name in sorted(names)[:_NUM_SHOWN])
                    found.append(f"{what} {shown}" + (f" and {rest} more" if rest > 0 else ""))
        return "; ".join(found) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Where parameters, buffers and extra state come from."""

    tensors: dict[Named, str]
    """The stored name of every parameter and buffer that is there."""
    owners: dict[str, str]
    """The stored name of every extra state that is there, by its name in the model."""


def plan_model(state: TrainingState, index: Index, problems: Problems) -> ModelPlan:
    """Return what a checkpoint has for a model, and note what does not fit."""
    contents = state.contents
    prefix = _prefix_of(contents.tensors, index)
    tensors: dict[Named, str] = {}
    for named in contents.tensors:
        stored = next((prefix + n for n in named.names if prefix + n in index.tensors), None)
        if stored is None:
            problems.missing.append(named.names[0])
        elif index.shape(stored) != tuple(named.tensor.shape):
            problems.wrong.append(
                f"{named.names[0]!r} of shape {index.shape(stored)} for {tuple(named.tensor.shape)}"
            )
        else:
            tensors[named] = stored
    owners = {name: prefix + name for name in contents.owners if prefix + name in index.names}
    problems.missing += contents.owners.keys() - owners.keys()
    known = {prefix + name for named in contents.tensors for name in named.names}
    problems.unexpected += _of_model(index, prefix) - known - set(owners.values())
    return ModelPlan(tensors=tensors, owners=owners)


def _prefix_of(tensors: Iterable[Named], index: Index) -> str:
    """Return what the names of the model begin with in the checkpoint."""
    names = [name for named in tensors for name in named.names]
    found = {prefix: sum(prefix + n in index.names for n in names) for prefix in _PREFIXES}
    return max(_PREFIXES, key=lambda prefix: found[prefix])


def _of_model(index: Index, prefix: str) -> set[str]:
    """Return the stored names that belong to the model."""
    apart = (*OF_OPTIMIZER, OURS)
    if FACTS not in index.names:
        apart += _NEIGHBOURS
    return {n for n in index.names if n.startswith(prefix) and not n.startswith(apart)}
