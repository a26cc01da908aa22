"""The order of copies on a device's streams, shown with a device that is played by the test.

Its copies land when somebody waits for their arrival, which is as late as a device may be. What
this cannot show is that the calls of ``streams`` mean the same to a real device: see
``test_device``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from shardwise.tiers import Copier, DiskOptions, DiskTier, HostTier, Lane, Tier, WorkerScheduler
from shardwise.tiers.block import Block
from shardwise.tiers.memory import HOST_DEVICE, as_bytes, empty, fill_memory, open_memory

NUMEL = 8


@dataclass
class PlayedArrival:
    """A copy queued on the device, with those it is queued behind."""

    before: list[PlayedArrival] = field(default_factory=list)
    copy: tuple[torch.Tensor, torch.Tensor] | None = None
    has_come: bool = False
    num_stream_waits: int = 0

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        for earlier in self.before:
            earlier.synchronize()
        if self.copy is not None and not self.has_come:
            source, target = self.copy
            as_bytes(target).copy_(as_bytes(source))
        self.has_come = True

    def wait(self, stream: object = None) -> None:
        self.num_stream_waits += 1


class PlayedStreams:
    """Stands for ``Streams``."""

    def __init__(self) -> None:
        self.queued: list[PlayedArrival] = []
        self.marks: list[PlayedArrival] = []

    def mark(self) -> PlayedArrival:
        self.marks.append(PlayedArrival())
        return self.marks[-1]

    def copy(self, source: Block, target: Block, *, after) -> PlayedArrival:
        self.queued.append(PlayedArrival(list(after), (source.tensor, target.tensor)))
        return self.queued[-1]

    def copy_through_host(self, source: Block, target: Block) -> None:
        with source.tier.open_pieces(source) as pieces:
            target.tier.write_pieces(target, pieces)


class PlayedTier(Tier):
    """Says that its memory is a device's."""

    def __init__(self) -> None:
        super().__init__("accelerator", budget_bytes=None, lane=Lane.MEMORY)
        self.left = []

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")

    def footprint_bytes(self, numel, dtype):
        return numel * dtype.itemsize

    def open_pieces(self, block, place=None):
        return open_memory(block)

    def write_pieces(self, block, pieces):
        fill_memory(block, pieces)

    def _create(self, numel, dtype):
        return Block(self, numel=numel, dtype=dtype, tensor=empty(numel, dtype, HOST_DEVICE))

    def _destroy(self, block, remains):
        self.left += remains.arrivals

    def _release_resources(self):
        pass


class Desk:
    """The played device, host and disk."""

    def __init__(self, folder) -> None:
        self.streams, self.device, self.host = PlayedStreams(), PlayedTier(), HostTier()
        self.disk = DiskTier(DiskOptions(folder=folder))
        self.copier = Copier(WorkerScheduler(), streams=self.streams)

    def block(self, tier: Tier, value: float | None = None) -> Block:
        block = tier.allocate(NUMEL, torch.float32)
        if value is not None:
            block.tensor.fill_(value)
        return block


@pytest.fixture
def desk(tmp_path):
    opened = Desk(tmp_path)
    yield opened
    opened.copier.close()
    opened.disk.close()


def is_filled_with(block: Block, value: float) -> bool:
    return bool((block.tensor == value).all())


def test_the_host_does_not_wait_for_a_copy_to_the_device_but_the_stream_does(desk):
    transfer = desk.copier.copy(desk.block(desk.host, 1), desk.block(desk.device))
    transfer.wait()
    [arrival] = desk.streams.queued
    assert not arrival.has_come
    assert arrival.num_stream_waits == 1
    transfer.synchronize()
    assert is_filled_with(transfer.target, 1)


def test_the_host_waits_for_a_copy_that_it_will_read(desk):
    transfer = desk.copier.copy(desk.block(desk.device, 1), desk.block(desk.host))
    transfer.wait()
    assert is_filled_with(transfer.target, 1)


def test_every_device_copy_starts_after_what_the_current_stream_had_queued(desk):
    desk.copier.copy(desk.block(desk.host, 1), desk.block(desk.device)).wait()
    [arrival], [mark] = desk.streams.queued, desk.streams.marks
    assert mark in arrival.before


def test_a_device_copy_starts_after_those_it_depends_on(desk):
    blocks = [desk.block(desk.host, 1), desk.block(desk.device), desk.block(desk.host)]
    first, second = (desk.copier.copy(*pair) for pair in itertools.pairwise(blocks))
    second.wait()
    first.wait()
    assert is_filled_with(blocks[2], 1)


def test_a_freed_block_leaves_its_tier_the_copies_that_may_still_run(desk):
    source, target = desk.block(desk.host, 1), desk.block(desk.device)
    desk.copier.copy(source, target).wait()
    desk.device.free(target)
    assert desk.device.left == desk.streams.queued


def test_ordinary_host_memory_is_freed_only_after_the_device_has_read_it(desk):
    source, target = desk.block(desk.host, 1), desk.block(desk.device)
    desk.copier.copy(source, target).wait()
    desk.host.free(source)
    assert is_filled_with(target, 1)


def test_a_copy_to_a_block_that_the_device_still_reads_lets_it_finish(desk):
    source, target = desk.block(desk.host, 1), desk.block(desk.device)
    desk.copier.copy(source, target).wait()
    desk.copier.copy(desk.block(desk.host, 2), source).wait()
    assert is_filled_with(target, 1)
    assert is_filled_with(source, 2)


@pytest.mark.parametrize("through_host", [True, False], ids=["host between", "direct"])
def test_a_file_is_written_after_the_device_copies_before_it(desk, through_host):
    blocks = [desk.block(desk.host, 1), desk.block(desk.device)]
    if through_host:
        blocks.append(desk.block(desk.host))
    blocks += [desk.disk.allocate(NUMEL, torch.float32), desk.block(desk.device)]
    pairs = itertools.pairwise(blocks)
    transfers = [desk.copier.copy(*pair) for pair in pairs]
    for transfer in reversed(transfers):
        transfer.wait()
    assert is_filled_with(blocks[-1], 1)
