"""What a model consists of, by the names of its plain twin; values are not touched.

Wrappers leave no trace in names: those of DistributedDataParallel, torch.compile and activation
checkpointing are dropped, as torch's own ``get_model_state_dict`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.runtime.managed import record_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.runtime.engine import Engine
    from shardwise.runtime.managed import ManagedParameter

_EXTRA_STATE = "_extra_state"
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Named:
    """One parameter or buffer."""

    names: tuple[str, ...]
    """The first is its own; the others are those that it is tied to."""
    tensor: torch.Tensor
    record: ManagedParameter | None
    """None for what is whole on every rank."""


class Contents:
    """Parameters, buffers and extra state of one model."""

    def __init__(self, model: nn.Module) -> None:
        """Read the names."""
        wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
        self._root: nn.Module = model.module if isinstance(model, wrappers) else model
        parameters = [
            (_clean(name), parameter)
            for name, parameter in self._root.named_parameters(remove_duplicate=False)
        ]
        self.parameters = _merge(parameters)
        """In the order of ``named_parameters``."""
        self.buffers = _merge(self._persistent_buffers())
        """Buffers that a state dict contains."""
        self.owners = dict(self._owners_of_extra_state())
        """Modules with a state of their own making, by its name."""
        self.by_tensor = {named.tensor: named for named in self.parameters}
        """How a parameter is called."""

    @property
    def engines(self) -> list[Engine]:
        """The engines behind the parameters, in order of first appearance."""
        records = [named.record for named in self.parameters]
        return list({record.engine: None for record in records if record is not None})

    @property
    def tensors(self) -> list[Named]:
        """All parameters and buffers."""
        return [*self.parameters, *self.buffers]

    @property
    def left_out(self) -> list[Named]:
        """What every rank holds whole."""
        return [named for named in self.tensors if named.record is None]

    def _persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers that are not marked as temporary."""
        for prefix, module in self._root.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield _clean(f"{prefix}.{name}" if prefix else name), buffer

    def _owners_of_extra_state(self) -> Iterator[tuple[str, Any]]:
        """Yield modules that define ``get_extra_state``."""
        for prefix, module in self._root.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield _clean(f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE), module


def _clean(name: str) -> str:
    """Return a name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _merge(found: Iterator[tuple[str, Any]] | list[tuple[str, Any]]) -> list[Named]:
    """Return every tensor once, with all its names."""
    names: dict[Any, list[str]] = {}
    for name, tensor in found:
        known = names.setdefault(tensor, [])
        if name not in known:
            known.append(name)
    return [
        Named(names=tuple(own), tensor=tensor, record=record_of(tensor))
        for tensor, own in names.items()
    ]
