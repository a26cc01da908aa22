"""How many bytes one engine holds on the accelerator, by what they are for, and how many at most.

A watched tensor counts with its storage, once, from when it is watched until its memory is free,
whoever holds it last. What operators allocate for themselves in between is not watched; the
allocator of a real accelerator has counted it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping


class Holding(Enum):
    """What bytes on the accelerator are for."""

    RESIDENT = "parameters and buffers that are always whole"
    SLICES = "slices of parameters, gradients and optimizer state"
    GATHERED = "chunks that are whole for a while"
    BUFFERS = "gradients on their way to slices, and buffers that wait for reuse"
    ACTIVATIONS = "what autograd saves for backward"


class _Entry:
    """One storage."""

    __slots__ = ("alive", "holding", "num_bytes")

    def __init__(self, holding: Holding, num_bytes: int) -> None:
        """Count it as ``holding``; ``alive`` is the reference that tells of its end."""
        self.holding, self.num_bytes = holding, num_bytes
        self.alive: weakref.ref[torch.UntypedStorage] | None = None


class Meter:
    """Counts what it is told to watch, from any thread."""

    def __init__(self, device: torch.device, *, is_on: bool = True) -> None:
        """Watch one device; a meter that is off watches nothing."""
        self.is_on = is_on
        self.cache_bytes = 0
        """What gathered chunks may take at least; ``lean_peak_bytes`` counts as much for them."""
        self.peak: Mapping[Holding, int] = {}
        """What was held when the most was held."""
        self.step_peak_bytes = 0
        """The most that was held since ``begin_step``."""
        self.lean_peak_bytes = 0
        """The most beside slices since then, with ``cache_bytes`` of gathered chunks."""
        self._device = device
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._watched: Counter[Holding] = Counter()
        self._slice_bytes = 0
        self._peak_bytes = 0

    @property
    def held(self) -> dict[Holding, int]:
        """What is held now."""
        with self._lock:
            held = {holding: self._watched[holding] for holding in Holding}
            held[Holding.SLICES] += self._slice_bytes
        return held

    @property
    def peak_bytes(self) -> int:
        """The most that was held since the start or the last reset."""
        return self._peak_bytes

    @property
    def unseen_bytes(self) -> int:
        """What the device's allocator has held beyond the peak: temporaries of operators, the loss.

        0 where ordinary memory stands for an accelerator.
        """
        if not self.is_on or self._device.type == "cpu":
            return 0
        seen = self.step_peak_bytes
        return max(0, torch.accelerator.max_memory_allocated(self._device) - seen)

    def reset(self) -> None:
        """Let the high-water mark of reports fall to what is held now; those of a step stay."""
        with self._lock:
            self._peak_bytes = 0
            self._note_peaks()

    def begin_step(self) -> None:
        """Let the high-water marks of a step fall to what is held now; the allocator's go along."""
        if self.is_on and self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
        with self._lock:
            self.step_peak_bytes = self.lean_peak_bytes = 0
            self._note_peaks()

    def watch(self, tensor: torch.Tensor, holding: Holding) -> None:
        """Count a tensor's memory from now on, or from now on as something else."""
        if not self.is_on or tensor.device.type != self._device.type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = _Entry(holding, storage.nbytes())
                entry.alive = weakref.ref(storage, partial(self._forget, key))
                self._entries[key] = entry
            else:
                self._watched[entry.holding] -= entry.num_bytes
                entry.holding = holding
            self._watched[holding] += entry.num_bytes
            self._note_peaks()

    def watch_new(self, tensor: torch.Tensor, holding: Holding) -> None:
        """Count a tensor's memory, unless it is counted as something else, or has none."""
        if not self.is_on or tensor.device.type != self._device.type:
            return
        try:
            key = tensor.untyped_storage()._cdata
        except NotImplementedError:  # sparse tensors and wrappers have no storage
            return
        if key not in self._entries:
            self.watch(tensor, holding)

    def note_slices(self, num_bytes: int) -> None:
        """Say how many bytes of slices lie in blocks of the accelerator's tier now."""
        with self._lock:
            self._slice_bytes = num_bytes
            self._note_peaks()

    def _forget(self, key: int, _: object) -> None:
        """Count a storage as free."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._watched[entry.holding] -= entry.num_bytes

    def _note_peaks(self) -> None:
        """Raise the high-water marks."""
        total = self._watched.total() + self._slice_bytes
        if total > self._peak_bytes:
            self._peak_bytes, self.peak = total, self.held
        self.step_peak_bytes = max(self.step_peak_bytes, total)
        slices = self._watched[Holding.SLICES] + self._slice_bytes
        lean = total - slices - self._watched[Holding.GATHERED] + self.cache_bytes
        self.lean_peak_bytes = max(self.lean_peak_bytes, lean)
