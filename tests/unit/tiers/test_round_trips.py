"""What goes into a tier comes out to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise.tiers import DiskOptions, open_tiers
from tests.kit.hostile import open_hostile_tiers
from tests.unit.tiers.values import have_equal_bits, random_values

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 4096, 10_001])
def test_values_come_back_bit_equal(place, dtype, numel):
    values = random_values(numel, dtype)
    assert have_equal_bits(place.load(place.store(values)), values)


def test_a_block_may_be_written_again(place):
    block = place.store(random_values(3000, torch.float32, seed=1))
    again = random_values(3000, torch.float32, seed=2)
    source = place.on_host(again)
    place.copy(source, block).wait()
    assert have_equal_bits(place.load(block), again)


def test_a_copy_inside_one_tier_is_bit_equal(place):
    values = random_values(3001, torch.float32)
    source = place.store(values)
    target = place.tier.allocate(values.numel(), values.dtype)
    place.copy(source, target).wait()
    assert have_equal_bits(place.load(target), values)
    assert have_equal_bits(place.load(source), values)


def test_blocks_do_not_share_bytes(place):
    values = [random_values(1500 + index, torch.int64, seed=index) for index in range(6)]
    blocks = [place.store(one) for one in values]
    place.tier.free(blocks[2])
    place.tier.free(blocks[4])
    values[4:5] = []
    values[2] = random_values(1200, torch.int64, seed=9)
    blocks[4:5] = []
    blocks[2] = place.store(values[2])
    for block, expected in zip(blocks, values, strict=True):
        assert have_equal_bits(place.load(block), expected)


def test_blocks_made_in_inference_mode_can_be_written_outside_of_it(place):
    values = random_values(10, torch.float32)
    with torch.inference_mode():
        block = place.tier.allocate(10, torch.float32)
        target = place.host.allocate(10, torch.float32)
    place.copy(place.on_host(values), block).wait()
    place.copy(block, target).wait()
    assert have_equal_bits(target.tensor, values)


PATHS = list(itertools.product(["accelerator", "host", "disk"], repeat=2))


@pytest.mark.parametrize("open_all", [open_tiers, open_hostile_tiers], ids=["workers", "hostile"])
@pytest.mark.parametrize(("source", "target"), PATHS, ids=[f"{a} to {b}" for a, b in PATHS])
def test_every_tier_reaches_every_other(tmp_path, open_all, source, target):
    device = () if open_all is open_hostile_tiers else (torch.device("cpu"),)
    values = random_values(5003, torch.float32)
    with open_all(*device, disk=DiskOptions(folder=tmp_path, piece_bytes=4096)) as tiers:
        blocks = [
            tier.allocate(values.numel(), values.dtype)
            for tier in (
                tiers.host,
                getattr(tiers, source),
                getattr(tiers, target),
                tiers.host,
            )
        ]
        blocks[0].tensor.copy_(values)
        transfers = [tiers.copy(*pair) for pair in itertools.pairwise(blocks)]
        for transfer in reversed(transfers):
            transfer.wait()
        assert have_equal_bits(blocks[-1].tensor, values)
