"""Bytes are counted exactly, and a budget refuses before anything changes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import BudgetError, ConfigurationError, ShardwiseError
from shardwise.tiers import DiskTier, HostTier, open_tiers
from tests.unit.tiers.values import have_equal_bits, random_values

SIZES = [(0, torch.float32), (1, torch.bfloat16), (1024, torch.float32), (1025, torch.float32)]
EXACT_BYTES = [0, 2, 4096, 4100]
SECTOR_BYTES = [0, 4096, 4096, 8192]


def test_a_block_counts_its_elements_in_memory_and_its_sectors_on_disk(place):
    expected = SECTOR_BYTES if isinstance(place.tier, DiskTier) else EXACT_BYTES
    held = 0
    for (numel, dtype), num_bytes in zip(SIZES, expected, strict=True):
        assert place.tier.footprint_bytes(numel, dtype) == num_bytes
        place.tier.allocate(numel, dtype)
        held += num_bytes
        assert place.tier.allocated_bytes == held


def test_freed_bytes_are_free_and_the_peak_stays_until_it_is_reset(place):
    tier = place.tier
    first, second = tier.allocate(2048, torch.float32), tier.allocate(1024, torch.float32)
    assert (tier.allocated_bytes, tier.peak_bytes) == (12288, 12288)
    tier.free(first)
    assert (tier.allocated_bytes, tier.peak_bytes) == (4096, 12288)
    tier.reset_peak()
    assert tier.peak_bytes == 4096
    tier.free(second)
    assert (tier.allocated_bytes, tier.peak_bytes) == (0, 4096)


def test_copies_do_not_change_what_is_held(place):
    block = place.store(random_values(1024, torch.float32))
    place.load(block)
    assert place.tier.allocated_bytes == place.tier.peak_bytes == 4096


def test_exactly_the_budget_fits(open_place):
    tier = open_place(budget_bytes=3 * 4096).tier
    assert tier.budget_bytes == 3 * 4096
    blocks = [tier.allocate(1024, torch.float32) for _ in range(3)]
    assert tier.allocated_bytes == tier.budget_bytes
    tier.free(blocks[1])
    tier.allocate(1024, torch.float32)
    assert tier.allocated_bytes == tier.budget_bytes


def test_over_budget_is_refused_with_nothing_changed(open_place):
    place = open_place(budget_bytes=3 * 4096)
    values = random_values(2048, torch.float32)
    block = place.store(values)
    with pytest.raises(BudgetError) as caught:
        place.tier.allocate(1025, torch.float32)
    assert (place.tier.allocated_bytes, place.tier.peak_bytes) == (8192, 8192)
    assert have_equal_bits(place.load(block), values)
    place.tier.allocate(1024, torch.float32)
    need_bytes = place.tier.footprint_bytes(1025, torch.float32)
    assert str(caught.value) == (
        f"{place.tier.name} tier expected at most 4096 bytes, free of its 12288, but got "
        f"{need_bytes} bytes (float32[1025]); free blocks first or raise the "
        f"{place.tier.name} budget."
    )


def test_a_budget_error_is_one_of_ours_and_one_of_memory():
    tier = HostTier(budget_bytes=0)
    with pytest.raises(MemoryError):
        tier.allocate(1, torch.float32)
    with pytest.raises(ShardwiseError):
        tier.allocate(1, torch.float32)


def test_blocks_without_elements_fit_a_budget_of_nothing(open_place):
    tier = open_place(budget_bytes=0).tier
    tier.free(tier.allocate(0, torch.float32))
    assert tier.allocated_bytes == tier.peak_bytes == 0


def test_scattered_free_bytes_are_as_good_as_any(open_place):
    place = open_place(budget_bytes=8 * 4096)
    blocks = [place.store(random_values(1024, torch.float32, seed=seed)) for seed in range(8)]
    for block in blocks[::2]:
        place.tier.free(block)
    values = random_values(4 * 1024, torch.float32, seed=9)
    scattered = place.store(values)
    assert have_equal_bits(place.load(scattered), values)
    for seed in (1, 3, 5, 7):
        expected = random_values(1024, torch.float32, seed=seed)
        assert have_equal_bits(place.load(blocks[seed]), expected)


def test_a_failed_allocation_counts_nothing(place, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(place.tier, "_create", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        place.tier.allocate(1024, torch.float32)
    assert place.tier.allocated_bytes == place.tier.peak_bytes == 0


def test_two_threads_never_share_the_last_bytes(open_place):
    tier = open_place(budget_bytes=16 * 4096).tier
    start, counts = threading.Barrier(4), []

    def take_all() -> None:
        start.wait()
        count = 0
        try:
            while True:
                tier.allocate(1024, torch.float32)
                count += 1
        except BudgetError:
            counts.append(count)

    threads = [threading.Thread(target=take_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 16
    assert tier.allocated_bytes == tier.peak_bytes == 16 * 4096


@pytest.mark.parametrize("name", ["accelerator", "host"])
def test_a_budget_below_zero_is_refused(name):
    budgets = {f"{name}_budget_bytes": -1}
    with pytest.raises(ConfigurationError, match=f"budget of the {name} tier"):
        open_tiers(torch.device("cpu"), **budgets)


def test_a_block_of_less_than_nothing_is_refused(place):
    with pytest.raises(ConfigurationError, match="numel of a block expected at least 0"):
        place.tier.allocate(-1, torch.float32)


def test_memory_is_counted_in_a_dry_run_that_allocates_nothing():
    with FakeTensorMode(), open_tiers(torch.device("cpu")) as tiers:
        numel = 2**40  # 4 TiB
        source = tiers.host.allocate(numel, torch.float32)
        target = tiers.accelerator.allocate(numel, torch.float32)
        tiers.copy(source, target).wait()
        tiers.host.free(source)
        assert (tiers.host.allocated_bytes, tiers.host.peak_bytes) == (0, 4 * numel)
        assert tiers.accelerator.allocated_bytes == 4 * numel
