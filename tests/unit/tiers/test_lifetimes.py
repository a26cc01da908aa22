"""Blocks end once, never under a copy, and nothing is used after its end."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import ConfigurationError, ShardwiseError
from shardwise.tiers import DiskTier, HostTier
from tests.unit.tiers.values import random_values


def test_a_second_free_is_refused_and_counts_nothing(place):
    block, other = place.tier.allocate(1024, torch.float32), place.tier.allocate(1, torch.float32)
    place.tier.free(block)
    held = place.tier.allocated_bytes
    with pytest.raises(ShardwiseError, match="expected a live block but got one that was freed"):
        place.tier.free(block)
    assert place.tier.allocated_bytes == held
    assert not other.is_freed


def test_a_block_of_another_tier_is_refused(place):
    foreign = HostTier().allocate(8, torch.float32)
    with pytest.raises(ShardwiseError, match="one of its own blocks"):
        place.tier.free(foreign)
    assert not foreign.is_freed


def test_a_freed_block_has_no_tensor(place):
    block = place.tier.allocate(8, torch.float32)
    place.tier.free(block)
    with pytest.raises(ShardwiseError, match=r"Block\(float32\[8\] in \w+\) expected a live block"):
        _ = block.tensor


def test_memory_has_tensors_and_disk_says_why_not(place):
    block = place.tier.allocate(8, torch.bfloat16)
    if isinstance(place.tier, DiskTier):
        with pytest.raises(ShardwiseError, match="copy it to a block on host or accelerator"):
            _ = block.tensor
    else:
        assert block.tensor.shape == (8,)
        assert block.tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("freed", ["source", "target"])
def test_a_copy_with_a_freed_block_is_refused_and_claims_neither(place, freed):
    block, other = place.store(torch.ones(8)), place.host.allocate(8, torch.float32)
    pair = (block, other) if freed == "source" else (other, block)
    place.tier.free(block)
    with pytest.raises(ShardwiseError, match="expected a live block"):
        place.copy(*pair)
    place.host.free(other)


def test_blocks_that_do_not_match_are_refused(place):
    block = place.store(torch.ones(8))
    for numel, dtype in ((9, torch.float32), (8, torch.int32)):
        other = place.host.allocate(numel, dtype)
        with pytest.raises(ConfigurationError, match="expected another block like"):
            place.copy(block, other)
    with pytest.raises(ConfigurationError, match="the block itself"):
        place.copy(block, block)
    place.tier.free(block)


def test_no_block_is_freed_before_its_copy_was_waited_for(place):
    values = random_values(2000, torch.float32)
    source, target = place.on_host(values), place.tier.allocate(2000, torch.float32)
    transfer = place.copy(source, target)
    for tier, block in ((place.host, source), (place.tier, target)):
        with pytest.raises(ShardwiseError, match="nobody waited for"):
            tier.free(block)
    transfer.wait()
    place.host.free(source)
    place.tier.free(target)
    assert place.tier.allocated_bytes == place.host.allocated_bytes == 0


def test_each_copy_needs_a_wait_of_its_own(place):
    source = place.store(torch.ones(8))
    targets = [place.host.allocate(8, torch.float32) for _ in range(2)]
    first, second = (place.copy(source, target) for target in targets)
    second.wait()
    with pytest.raises(ShardwiseError, match="got 1 that nobody waited for"):
        place.tier.free(source)
    first.wait()
    place.tier.free(source)


def test_wait_may_be_called_again_after_the_blocks_are_gone(place):
    source, target = place.on_host(torch.ones(8)), place.tier.allocate(8, torch.float32)
    transfer = place.copy(source, target)
    transfer.wait()
    place.host.free(source)
    place.tier.free(target)
    transfer.wait()
    transfer.synchronize()


def test_close_frees_everything_and_may_be_called_again(place):
    block = place.store(torch.ones(8))
    place.tier.close()
    place.tier.close()
    assert block.is_freed
    assert place.tier.allocated_bytes == 0


def test_a_closed_tier_refuses_every_use(place):
    block = place.store(torch.ones(8))
    place.tier.close()
    with pytest.raises(ShardwiseError, match="expected to be open"):
        place.tier.allocate(8, torch.float32)
    with pytest.raises(ShardwiseError, match="expected a live block"):
        place.tier.free(block)
    with pytest.raises(ShardwiseError, match="expected a live block"):
        place.copy(block, place.host.allocate(8, torch.float32))


def test_close_lets_copies_under_way_arrive(place):
    values = random_values(3000, torch.float32)
    block = place.store(values)
    target = place.host.allocate(3000, torch.float32)
    transfer = place.copy(block, target)
    place.tier.close()
    transfer.wait()
    assert torch.equal(target.tensor.view(torch.int32), values.view(torch.int32))


def test_a_closed_copier_refuses_and_claims_neither_block(place):
    source, target = place.on_host(torch.ones(8)), place.tier.allocate(8, torch.float32)
    place.copier.close()
    place.copier.close()
    with pytest.raises(ShardwiseError, match="after close"):
        place.copy(source, target)
    place.host.free(source)
    place.tier.free(target)
