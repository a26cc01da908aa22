"""Tiers of a real device: only where there is one."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise.tiers import DiskOptions, HostTier, open_tiers
from tests.unit.tiers.values import have_equal_bits, random_values

pytestmark = pytest.mark.accelerator

NUMEL = 2**20 + 3


@pytest.fixture
def tiers(tmp_path):
    device = torch.accelerator.current_accelerator()
    with open_tiers(device, disk=DiskOptions(folder=tmp_path)) as opened:
        yield opened


def on_host(tiers, values: torch.Tensor):
    block = tiers.host.allocate(values.numel(), values.dtype)
    block.tensor.copy_(values)
    return block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_values_come_back_bit_equal_over_device_and_disk(tiers, dtype):
    values = random_values(NUMEL, dtype)
    path = (tiers.accelerator, tiers.disk, tiers.accelerator, tiers.host)
    blocks = [on_host(tiers, values), *(tier.allocate(NUMEL, dtype) for tier in path)]
    for transfer in [tiers.copy(*pair) for pair in itertools.pairwise(blocks)]:
        transfer.wait()
    assert have_equal_bits(blocks[-1].tensor, values)


def test_kernels_before_and_after_a_copy_keep_their_order(tiers):
    source = tiers.accelerator.allocate(NUMEL, torch.float32)
    target = tiers.host.allocate(NUMEL, torch.float32)
    for value in range(20):
        source.tensor.fill_(value)
        tiers.copy(source, target).wait()
        source.tensor.fill_(-1)
        assert torch.equal(target.tensor, torch.full((NUMEL,), float(value)))


def test_host_memory_is_freed_and_reused_behind_a_copy(tiers):
    target = tiers.accelerator.allocate(NUMEL, torch.float32)
    for value in range(20):
        source = on_host(tiers, torch.full((NUMEL,), float(value)))
        tiers.copy(source, target).wait()
        tiers.host.free(source)
        reused = on_host(tiers, torch.full((NUMEL,), -1.0))
        assert bool((target.tensor == value).all())
        tiers.host.free(reused)


def test_host_memory_is_page_locked_on_cuda(tiers):
    assert isinstance(tiers.host, HostTier)
    if torch.accelerator.current_accelerator().type != "cuda":
        pytest.skip("only CUDA's memory is page-locked")
    assert tiers.host.is_pinned
    assert on_host(tiers, torch.ones(3)).tensor.is_pinned()
