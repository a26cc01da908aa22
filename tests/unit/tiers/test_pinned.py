"""Page-locked memory is exact, reused, bounded, and never reused under a device's copy.

The registrar and the device's events are stand-ins: these tests show the bookkeeping, not CUDA.
"""

from __future__ import annotations

import pytest
import torch

from shardwise.tiers import HostTier
from shardwise.tiers.pages import PAGE_BYTES
from shardwise.tiers.pinned import PinnedMemory


class CountingRegistrar:
    """Notes which pages are registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.num_registrations = 0

    def register(self, memory: torch.Tensor) -> None:
        assert memory.data_ptr() % PAGE_BYTES == 0
        self.registered[memory.data_ptr()] = memory.numel()
        self.num_registrations += 1

    def unregister(self, memory: torch.Tensor) -> None:
        del self.registered[memory.data_ptr()]


class ManualArrival:
    """A device's copy that ends when the test, or somebody who waits, says so."""

    def __init__(self) -> None:
        self.has_come = False
        self.num_synchronized = 0

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.num_synchronized += 1
        self.has_come = True

    def wait(self, stream: object = None) -> None:
        pass


@pytest.fixture
def registrar():
    return CountingRegistrar()


@pytest.fixture
def pinned(registrar):
    return PinnedMemory(registrar)


def test_registered_memory_is_no_larger_than_its_pages(registrar, pinned):
    pinned.take(3 * PAGE_BYTES + 1)
    assert list(registrar.registered.values()) == [4 * PAGE_BYTES]


def test_memory_of_the_same_size_is_reused_without_registering(registrar, pinned):
    first = pinned.take(5000)
    pinned.give_back(first, ())
    assert pinned.take(5001).data_ptr() == first.data_ptr()
    assert registrar.num_registrations == 1


def test_never_more_is_registered_than_was_in_use_at_the_peak(registrar, pinned):
    held = [pinned.take(PAGE_BYTES) for _ in range(4)]
    for memory in held:
        pinned.give_back(memory, ())
    assert pinned.registered_bytes == 4 * PAGE_BYTES
    pinned.take(3 * PAGE_BYTES)
    assert pinned.registered_bytes == sum(registrar.registered.values()) == 4 * PAGE_BYTES


def test_giving_back_does_not_wait_and_reuse_does(pinned):
    arrival = ManualArrival()
    pinned.give_back(pinned.take(PAGE_BYTES), (arrival,))
    assert arrival.num_synchronized == 0
    pinned.take(PAGE_BYTES)
    assert arrival.num_synchronized == 1


def test_memory_that_a_device_has_left_is_reused_first(pinned):
    busy, done = pinned.take(PAGE_BYTES), pinned.take(PAGE_BYTES)
    arrival = ManualArrival()
    pinned.give_back(busy, (arrival,))
    pinned.give_back(done, ())
    assert pinned.take(PAGE_BYTES).data_ptr() == done.data_ptr()
    assert arrival.num_synchronized == 0


def test_memory_is_not_unregistered_under_a_copy(registrar, pinned):
    arrival = ManualArrival()
    pinned.give_back(pinned.take(PAGE_BYTES), (arrival,))
    pinned.take(PAGE_BYTES * 2)
    pinned.close()
    assert arrival.num_synchronized == 1
    assert sorted(registrar.registered.values()) == [2 * PAGE_BYTES]


def test_a_host_tier_counts_the_pages_that_it_locks(registrar):
    tier = HostTier(budget_bytes=2 * PAGE_BYTES, pinned=PinnedMemory(registrar))
    assert tier.is_pinned
    block = tier.allocate(5, torch.bfloat16)
    assert block.tensor.shape == (5,)
    assert block.tensor.dtype == torch.bfloat16
    assert tier.allocated_bytes == sum(registrar.registered.values()) == PAGE_BYTES
    tier.free(block)
    tier.free(tier.allocate(0, torch.float32))
    tier.close()
    assert registrar.registered == {}
