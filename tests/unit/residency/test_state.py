"""Limits follow the budget, and a residency has a home for every slice."""

from __future__ import annotations

import pytest

from shardwise import ConfigurationError
from shardwise.options import Budget
from shardwise.residency import ChunkBytes, Limits, Purpose, Tier, reside, resolve_limits


def test_limits_are_resolved_with_the_capacities_of_devices() -> None:
    budget = Budget(accelerator="50%", host=7, disk="10%", disk_path="state")
    limits = resolve_limits(budget, accelerator_bytes=100, host_bytes=100, disk_bytes=1000)
    assert limits == Limits(accelerator_bytes=50, host_bytes=7, disk_bytes=100)
    assert [limits.of(tier) for tier in Tier] == [50, 7, 100]


def test_there_is_a_disk_tier_only_where_there_is_a_folder() -> None:
    assert resolve_limits(Budget()).disk_bytes == 0
    assert resolve_limits(Budget(disk_path="state")).disk_bytes is None


def test_a_share_needs_a_capacity() -> None:
    with pytest.raises(ConfigurationError, match=r"Budget\.host"):
        resolve_limits(Budget(host="80%"), accelerator_bytes=100)


def test_homes_are_counted_in_bytes_and_read_only() -> None:
    chunks = [
        ChunkBytes(working_bytes=2, master_bytes=4, optimizer_bytes=8, gradient_bytes=1),
        ChunkBytes(working_bytes=20, master_bytes=40, optimizer_bytes=80, gradient_bytes=10),
    ]
    residency = reside([Tier.ACCELERATOR, Tier.DISK], [Tier.HOST, Tier.ACCELERATOR])
    assert [residency.bytes_in(tier, chunks) for tier in Tier] == [132, 13, 20]
    assert residency.home(1, Purpose.WORKING) is Tier.DISK
    assert residency.update_home(0) is residency.home(0, Purpose.GRADIENT) is Tier.HOST
    with pytest.raises(TypeError, match="mappingproxy"):
        residency.homes[next(iter(residency.homes))] = Tier.DISK


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="sizes from 0"):
        ChunkBytes(optimizer_bytes=-1)
