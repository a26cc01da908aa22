"""Tiers for tests of what rests off the accelerator."""

from __future__ import annotations

from shardwise.runtime import offload as runtime_offload
from tests.kit.hostile import open_hostile_tiers


def use_hostile_tiers(monkeypatch, *, seed: int = 0) -> None:
    """Open hostile tiers from now on: copies land when waited for, undefined memory is NaN."""

    def open_tiers(device, *, disk=None):
        return open_hostile_tiers(seed=seed, early_share=0.3, disk=disk)

    monkeypatch.setattr(runtime_offload, "open_tiers", open_tiers)


def tiers_of(model):
    """Return the tiers behind a sharded module."""
    return model._shardwise.offload.mover.tiers
