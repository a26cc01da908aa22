"""Count what autograd saves where nothing else looks at it: where parameters stay whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwise.runtime.handles import restore, save
from shardwise.runtime.managed import local_part
from shardwise.runtime.meter import Holding

if TYPE_CHECKING:
    from shardwise.runtime.meter import Meter


class SavedTensorWatch:
    """Tells a meter what is saved while a module runs forward."""

    def __init__(self, meter: Meter) -> None:
        """Watch nothing yet."""
        self._meter = meter
        self._active: saved_tensors_hooks | None = None

    def begin(self) -> None:
        """Start to look, unless a user's own hooks decide what is saved."""
        self.end()  # of a call that an interrupt has torn down
        autograd: Any = torch._C._autograd
        if not self._meter.is_on or not torch.is_grad_enabled():
            return
        if not autograd._saved_tensors_hooks_is_enabled():
            return  # function transforms forbid hooks
        if autograd._top_saved_tensors_default_hooks(True) is None:
            self._active = saved_tensors_hooks(self._pack, restore)
            self._active.__enter__()

    def end(self) -> None:
        """Look no more."""
        active, self._active = self._active, None
        if active is not None:
            active.__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Count a tensor and save it."""
        self._meter.watch_new(local_part(tensor), Holding.ACTIVATIONS)
        return save(tensor)
