"""Large host blocks are read from a file and written to it where they lie."""

from __future__ import annotations

import ctypes

import pytest
import torch

from shardwise.tiers import Copier, CorruptedBlockError, DiskOptions, DiskTier, HostTier
from shardwise.tiers.workers import WorkerScheduler
from tests.unit.tiers.conftest import Place
from tests.unit.tiers.faulty import FaultyFileCalls
from tests.unit.tiers.values import have_equal_bits, random_values

PIECE_BYTES = 256 * 1024
MIB = 2**20
SIZES = [MIB, MIB + 4096, MIB + 4096 + 4, 5 * PIECE_BYTES - 4, 5 * PIECE_BYTES + 4]


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.fixture
def seen():
    """Where each call read to or wrote from: (name, address, bytes)."""
    return []


@pytest.fixture
def place(tmp_path, seen):
    def watch(name):
        def call(real, descriptor, view, offset):
            seen.append((name, address_of(view), len(view)))
            return getattr(real, name)(descriptor, view, offset)

        return call

    calls = FaultyFileCalls(read=watch("read"), write=watch("write"))
    options = DiskOptions(folder=tmp_path, piece_bytes=PIECE_BYTES)
    opened = Place(
        DiskTier(options, calls=calls), HostTier(is_mapped=True), Copier(WorkerScheduler())
    )
    yield opened
    opened.copier.close()
    opened.tier.close()


@pytest.mark.parametrize("num_bytes", SIZES)
def test_whole_pieces_pass_through_no_buffer(place, seen, num_bytes) -> None:
    values = random_values(num_bytes // 4, torch.float32)
    source = place.on_host(values)
    target = place.host.allocate(values.numel(), values.dtype)
    block = place.tier.allocate(values.numel(), values.dtype)
    place.copy(source, block).wait()
    place.copy(block, target).wait()
    assert have_equal_bits(target.tensor, values)
    assert target.tensor.untyped_storage().nbytes() == num_bytes
    for name, memory in (("write", source), ("read", target)):
        start = memory.tensor.data_ptr()
        sizes = [
            size for call, at, size in seen if call == name and start <= at < start + num_bytes
        ]
        tail_bytes = num_bytes % PIECE_BYTES
        # what is read may end inside a piece, at a sector; what is written is whole pieces
        in_place = num_bytes - (tail_bytes if name == "write" or tail_bytes % 4096 else 0)
        assert sum(sizes) == in_place, name
        assert place.host.allocated_bytes == 2 * num_bytes


def test_runs_that_are_scattered_in_the_file_keep_their_order(place, seen) -> None:
    """The only free space lies between other blocks."""
    small = [place.tier.allocate(PIECE_BYTES // 4 * 3, torch.float32) for _ in range(100)]
    for block in small[::2]:
        place.tier.free(block)
    values = random_values(20 * PIECE_BYTES // 4, torch.float32)
    assert have_equal_bits(place.load(place.store(values)), values)


def test_damage_is_found_in_what_is_read_in_place(place, tmp_path) -> None:
    values = random_values(MIB // 4, torch.float32)
    block = place.store(values)
    record = place.tier._records[block]
    record.checksums = (record.checksums[0], record.checksums[1] ^ 1, *record.checksums[2:])
    target = place.host.allocate(values.numel(), values.dtype)
    with pytest.raises(CorruptedBlockError):
        place.copy(block, target).wait()


def test_memory_that_starts_anywhere_goes_through_buffers(place, seen) -> None:
    """A block of a tier that promises no alignment."""
    values = random_values(2 * MIB // 4, torch.float32)
    plain = HostTier()
    source = plain.allocate(values.numel(), values.dtype)
    source.tensor.copy_(values)
    block = place.tier.allocate(values.numel(), values.dtype)
    place.copy(source, block).wait()
    assert have_equal_bits(place.load(block), values)
