"""The hostile stand-in turns each mistake with a copy into a wrong number or an error."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import ShardwiseError
from tests.kit.hostile import is_poisoned, open_hostile_tiers

NUMEL = 16
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.fixture
def tiers():
    with open_hostile_tiers() as opened:
        yield opened


def on_host(tiers, value: float, dtype: torch.dtype = torch.float32):
    block = tiers.host.allocate(NUMEL, dtype)
    block.tensor.fill_(value)
    return block


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_missing_wait_reads_poison(tiers, dtype):
    target = tiers.accelerator.allocate(NUMEL, dtype)
    target.tensor.fill_(1)  # not even the old values are left
    transfer = tiers.copy(on_host(tiers, 1, dtype), target)
    assert is_poisoned(target.tensor)
    transfer.wait()
    assert torch.equal(target.tensor, torch.ones(NUMEL, dtype=dtype))


def test_the_wait_of_another_copy_does_not_stand_for_the_missing_one(tiers):
    targets = [tiers.accelerator.allocate(NUMEL, torch.float32) for _ in range(2)]
    _, second = (tiers.copy(on_host(tiers, 1), target) for target in targets)
    second.wait()
    assert is_poisoned(targets[0].tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_use_after_free_reads_poison(tiers, dtype):
    block = tiers.accelerator.allocate(NUMEL, dtype)
    kept = block.tensor.fill_(1)
    tiers.accelerator.free(block)
    assert is_poisoned(kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_use_before_any_write_reads_poison(tiers, dtype):
    assert is_poisoned(tiers.accelerator.allocate(NUMEL, dtype).tensor)


def test_a_source_written_before_the_wait_spoils_the_target(tiers):
    source, target = on_host(tiers, 1), tiers.accelerator.allocate(NUMEL, torch.float32)
    transfer = tiers.copy(source, target)
    source.tensor.fill_(2)
    transfer.wait()
    assert torch.equal(target.tensor, torch.full((NUMEL,), 2.0))


def test_a_free_before_the_wait_is_refused(tiers):
    source, target = on_host(tiers, 1), tiers.accelerator.allocate(NUMEL, torch.float32)
    tiers.copy(source, target)
    with pytest.raises(ShardwiseError, match="nobody waited for"):
        tiers.host.free(source)


def landing_order(seed: int) -> tuple[int, ...]:
    """Return the order in which five independent copies land when all of them have to."""
    landed: list[int] = []
    with open_hostile_tiers(seed=seed) as tiers:
        targets = [tiers.accelerator.allocate(NUMEL, torch.float32) for _ in range(5)]
        write = tiers.accelerator.write_pieces

        def note(block, pieces):
            landed.append(targets.index(block))
            write(block, pieces)

        tiers.accelerator.write_pieces = note
        for target in targets:
            tiers.copy(on_host(tiers, 1), target)
    return tuple(landed)


def test_independent_copies_land_in_an_order_chosen_by_the_seed():
    orders = {seed: landing_order(seed) for seed in range(8)}
    assert all(sorted(order) == list(range(5)) for order in orders.values())
    assert len(set(orders.values())) > 4
    assert orders == {seed: landing_order(seed) for seed in range(8)}


def test_copies_may_be_made_to_land_early_too():
    with open_hostile_tiers(early_share=1.0) as tiers:
        targets = [tiers.accelerator.allocate(NUMEL, torch.float32) for _ in range(2)]
        _, second = (tiers.copy(on_host(tiers, 1), target) for target in targets)
        second.wait()
        assert torch.equal(targets[0].tensor, torch.ones(NUMEL))
