"""Copies between host and a device on side streams, ordered by events.

The rules that keep a device copy correct:

- It starts after everything that the current stream had queued when it was asked for: a kernel that
  writes the source, or reads what the target held before.
- It starts after the copies it depends on, on whatever stream they are.
- Each direction has a stream of its own: the device copies both ways at once.
- An entered stream remembers what was current before it, so one thread at a time enters it.

``torch.Stream`` and ``torch.Event`` are what every accelerator of torch has: nothing is CUDA only.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from shardwise.tiers.memory import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.tiers.block import Arrival, Block


class Streams:
    """The side streams of one device."""

    def __init__(self, device: torch.device) -> None:
        """Make one stream for copies to the device, and one for all others."""
        self._device = device
        self._inward = torch.Stream(device)
        self._outward = torch.Stream(device)
        self._lock = threading.Lock()

    def mark(self) -> torch.Event:
        """Return an event behind everything that the current stream has queued."""
        return torch.accelerator.current_stream(self._device).record_event()

    def copy(self, source: Block, target: Block, *, after: Iterable[Arrival]) -> torch.Event:
        """Queue a copy behind ``after``; return the event of its arrival. The host goes on."""
        stream = self._inward if target.tier.device == self._device else self._outward
        with self._lock:
            for arrival in after:
                arrival.wait(stream)
            with stream:
                as_bytes(target.tensor).copy_(as_bytes(source.tensor), non_blocking=True)
            return stream.record_event()

    def copy_through_host(self, source: Block, target: Block) -> None:
        """Copy between the device and a file; returns when the bytes are there.

        The caller has let the device finish what comes before.
        """
        stream = torch.Stream(self._device)
        with stream, source.tier.open_pieces(source) as pieces:
            target.tier.write_pieces(target, pieces)
        stream.synchronize()
