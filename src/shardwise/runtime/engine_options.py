"""What one engine can be made to do; the public faces translate their arguments into this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.options import AdaptiveOffload, StaticOffload
    from shardwise.runtime.build import PackingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of one engine."""

    stage: int
    """0 to 3."""
    packing: PackingPolicy
    """Dtypes and chunks."""
    sums_gradients: bool = False
    """Sum gradients over ranks instead of averaging them."""
    knows_model: bool = False
    """Parameters are used inside one known module, so that first uses can wait for updates."""
    leaves_stand_ins: bool = True
    """Put a stand-in into ``parameter.grad`` while a reduced gradient is held; else None."""
    offload: StaticOffload | AdaptiveOffload | None = None
    """What rests off the accelerator between uses."""
    keep_bytes: float = 0
    """Stage 3: gathered bytes to keep between forward and backward; inf keeps all."""
    prefetch_bytes: int | None = None
    """Stage 3: bytes gathered ahead of their use; None allows one bundle."""
