"""Tiers for tests of what rests off the accelerator."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import shardwise as sw
from shardwise.runtime import offload as runtime_offload
from tests.kit.hostile import open_hostile_tiers

if TYPE_CHECKING:
    import pytest
    import torch
    from torch import nn

    from shardwise.tiers import Tiers


def use_hostile_tiers(monkeypatch: pytest.MonkeyPatch, *, seed: int = 0) -> None:
    """Open hostile tiers from now on: copies land when waited for, undefined memory is NaN."""

    monkeypatch.setattr(runtime_offload, "open_tiers", partial(_open_hostile, seed=seed))


def tiers_of(model: nn.Module) -> Tiers:
    """Return the tiers behind a sharded module."""
    engine: Any = model.__dict__["_shardwise"]
    return engine.offload.mover.tiers


def offload_everything(*, seed: int = 0) -> None:
    """Let all that is sharded from now on rest in hostile host memory, unless a test says where."""

    def check(choice: Any, *, stage: int) -> Any:
        # alone, a rank's parameters are always there: tests of one process rely on it
        parameters = 1.0 if stage == 3 and dist.get_world_size() > 1 else 0.0
        everything = sw.StaticOffload(optimizer=1.0, parameters=parameters)
        return real(everything if choice is None else choice, stage=stage)

    real = runtime_offload.check_offload
    for name in ("shardwise.shard", "shardwise.optimizer.setup"):
        module: Any = sys.modules[name]
        module.check_offload = check
    runtime_offload.open_tiers = partial(_open_hostile, seed=seed)


def _open_hostile(device: torch.device, **options: Any) -> Tiers:
    """Open hostile tiers for a device."""
    return open_hostile_tiers(early_share=0.3, **options)
