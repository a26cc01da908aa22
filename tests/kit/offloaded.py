"""Tiers for tests of what rests off the accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.runtime import offload as runtime_offload
from tests.kit.hostile import open_hostile_tiers

if TYPE_CHECKING:
    import pytest
    import torch
    from torch import nn

    from shardwise.tiers import DiskOptions, Tiers


def use_hostile_tiers(monkeypatch: pytest.MonkeyPatch, *, seed: int = 0) -> None:
    """Open hostile tiers from now on: copies land when waited for, undefined memory is NaN."""

    def open_tiers(
        device: torch.device,
        *,
        host_budget_bytes: int | None = None,
        disk_budget_bytes: int | None = None,
        disk: DiskOptions | None = None,
    ) -> Tiers:
        return open_hostile_tiers(
            seed=seed,
            early_share=0.3,
            host_budget_bytes=host_budget_bytes,
            disk_budget_bytes=disk_budget_bytes,
            disk=disk,
        )

    monkeypatch.setattr(runtime_offload, "open_tiers", open_tiers)


def tiers_of(model: nn.Module) -> Tiers:
    """Return the tiers behind a sharded module."""
    engine: Any = model.__dict__["_shardwise"]
    return engine.offload.mover.tiers
