"""``state_dict`` at stage 3: whole plain tensors, one gathered chunk at a time.

Every module of a sharded one is hooked, since a state dict may be asked of any part. Loading needs
no hook: a write to an absent parameter stores the owned piece (``absent``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.runtime.hooks import Hook
from shardwise.runtime.managed import record_of

if TYPE_CHECKING:
    from shardwise.runtime.managed import ManagedParameter
    from shardwise.runtime.residence import Residence


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """Return a copy that takes no memory of an accelerator."""
    return value.to("cpu", copy=True)


class WholeState:
    """Hooks that copy gathered values into state dicts."""

    def __init__(self, residence: Residence) -> None:
        """Serve one residence."""
        self._residence = residence
        self._open: list[nn.Module] = []
        self._copies: dict[ManagedParameter, torch.Tensor] = {}

    def attach(self, root: nn.Module) -> None:
        """Hook every module."""
        for module in root.modules():
            module.register_state_dict_pre_hook(Hook(self._begin))
            module.register_state_dict_post_hook(Hook(self._end))

    def serve(self, residence: Residence) -> None:
        """Serve chunks that were packed anew."""
        self._residence = residence

    @property
    def is_reading(self) -> bool:
        """True while a state dict is being made."""
        return bool(self._open)

    def _begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Allow reads of a module's parameters."""
        if self._open and all(module is not child for child in self._open[-1].children()):
            self._open.clear()  # left by a call that raised
            self._copies.clear()
        if not self._open:
            self._residence.whereabouts.begin("state_dict() of the model")
        self._open.append(module)

    def _end(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object
    ) -> None:
        """Replace views of gathered chunks, which are about to go, by copies on the CPU."""
        for name, parameter in module._parameters.items():
            record = None if parameter is None else record_of(parameter)
            value = state_dict.get(prefix + name)
            if record is None or value is None or isinstance(value, nn.Parameter):
                continue
            if record not in self._copies:
                is_distributed = isinstance(value, DTensor)
                self._copies[record] = value.clone() if is_distributed else _on_cpu(value)
            state_dict[prefix + name] = self._copies[record]
        while self._open and self._open.pop() is not module:
            pass
        if not self._open:
            self._copies.clear()
            self._residence.rest()
            self._residence.whereabouts.end()
