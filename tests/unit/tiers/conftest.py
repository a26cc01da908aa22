"""Every tier behind one fixture: what passes here is a tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from shardwise.tiers import (
    AcceleratorTier,
    Block,
    Copier,
    DiskOptions,
    DiskTier,
    HostTier,
    Tier,
    Transfer,
    WorkerScheduler,
)
from tests.kit.hostile import HostileTier, LateScheduler

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ["accelerator", "host", "disk direct", "disk buffered", "hostile"]
PAGE_BYTES = 4096


@dataclass
class Place:
    """One tier, and host memory that values come from and go to."""

    tier: Tier
    host: Tier
    copier: Copier

    def copy(self, source: Block, target: Block) -> Transfer:
        return self.copier.copy(source, target)

    def on_host(self, values: torch.Tensor) -> Block:
        block = self.host.allocate(values.numel(), values.dtype)
        block.tensor.copy_(values)
        return block

    def store(self, values: torch.Tensor) -> Block:
        """Return a new block of the tier that holds the values."""
        block = self.tier.allocate(values.numel(), values.dtype)
        source = self.on_host(values)
        self.copy(source, block).wait()
        self.host.free(source)
        return block

    def load(self, block: Block) -> torch.Tensor:
        """Return a copy of the block's values."""
        target = self.host.allocate(block.numel, block.dtype)
        self.copy(block, target).wait()
        values = target.tensor.clone()
        self.host.free(target)
        return values


OpenPlace = Callable[..., Place]


@pytest.fixture(params=KINDS)
def open_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenPlace]:
    """Open the tier with a budget of its own; everything is closed after the test."""
    places: list[Place] = []

    def open_one(budget_bytes: int | None = None) -> Place:
        kind = request.param
        if kind == "accelerator":
            tier: Tier = AcceleratorTier(torch.device("cpu"), budget_bytes=budget_bytes)
        elif kind == "host":
            tier = HostTier(budget_bytes=budget_bytes)
        elif kind == "hostile":
            tier = HostileTier(budget_bytes=budget_bytes)
        else:
            # small pieces and extents: tiny blocks then have several of each
            options = DiskOptions(
                folder=tmp_path,
                use_direct=kind == "disk direct",
                piece_bytes=PAGE_BYTES,
                extent_bytes=2 * PAGE_BYTES,
                num_buffers=2,
            )
            tier = DiskTier(options, budget_bytes=budget_bytes)
            if tier.is_direct != options.use_direct:
                pytest.skip(f"the file system of {tmp_path} has no O_DIRECT")
        scheduler = LateScheduler(seed=1) if kind == "hostile" else WorkerScheduler()
        places.append(Place(tier, HostTier(), Copier(scheduler)))
        return places[-1]

    yield open_one
    for place in places:
        place.copier.close()
        place.tier.close()
        place.host.close()


@pytest.fixture
def place(open_place: OpenPlace) -> Place:
    """The tier without a budget."""
    return open_place()
