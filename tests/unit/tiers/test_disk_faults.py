"""What goes wrong with a disk is found, named, and leaves all other blocks as they were."""

from __future__ import annotations

import os
from errno import EDQUOT, EINVAL, EIO, ENOSPC

import pytest
import torch

from shardwise.errors import BudgetError, ConfigurationError, ShardwiseError
from shardwise.tiers import Copier, CorruptedBlockError, DiskOptions, DiskTier, HostTier
from shardwise.tiers.workers import WorkerScheduler
from tests.unit.tiers.conftest import Place
from tests.unit.tiers.faulty import FaultyFileCalls, failing_with
from tests.unit.tiers.values import have_equal_bits, random_values

VALUES = random_values(5003, torch.float32)


@pytest.fixture
def calls():
    """File calls without faults; buffered, whatever the file system has."""
    return FaultyFileCalls(set_direct=lambda *_, **__: None)


@pytest.fixture
def place(tmp_path, calls):
    options = DiskOptions(folder=tmp_path, piece_bytes=8192, extent_bytes=8192)
    opened = Place(DiskTier(options, calls=calls), HostTier(), Copier(WorkerScheduler()))
    yield opened
    opened.copier.close()
    opened.tier.close()


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("most_bytes", [4096, 1000, 1])
def test_short_calls_are_continued(place, calls, call, most_bytes):
    num_short = 0

    def short(real, descriptor, view, offset):
        nonlocal num_short
        num_short += len(view) > most_bytes and num_short < 50
        part = view[:most_bytes] if num_short < 50 else view
        return getattr(real, call)(descriptor, part, offset)

    calls.faults[call] = short
    assert have_equal_bits(place.load(place.store(VALUES)), VALUES)
    assert num_short


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_call_without_progress_is_an_error(place, calls, call):
    block = place.store(VALUES)
    calls.faults[call] = lambda *_: 0
    with pytest.raises(ShardwiseError, match=r"disk tier, unnamed file in .* but got 0; look at"):
        place.load(block) if call == "read" else place.store(VALUES)


def test_a_failed_read_is_named_and_may_be_repeated(place, calls):
    block = place.store(VALUES)
    calls.faults["read"] = failing_with(EIO)
    with pytest.raises(
        ShardwiseError, match=r"8192 bytes to be read at offset 0 but got .*Errno 5"
    ):
        place.load(block)
    del calls.faults["read"]
    assert have_equal_bits(place.load(block), VALUES)


@pytest.mark.parametrize("code", [EIO, ENOSPC, EDQUOT], ids=["EIO", "ENOSPC", "EDQUOT"])
def test_a_failed_write_leaves_its_block_unwritten_and_others_whole(place, calls, code):
    good, bad = place.store(VALUES), place.store(VALUES)
    source = place.on_host(VALUES)
    calls.faults["write"] = failing_with(code)
    transfer = place.copy(source, bad)
    with pytest.raises(ShardwiseError, match="bytes to be written at offset") as caught:
        transfer.wait()
    assert isinstance(caught.value, BudgetError) == (code != EIO)
    del calls.faults["write"]
    with pytest.raises(ShardwiseError, match="expected a block that was written"):
        place.load(bad)
    assert have_equal_bits(place.load(good), VALUES)
    place.copy(source, bad).wait()
    assert have_equal_bits(place.load(bad), VALUES)


def test_more_failures_than_buffers_leave_no_buffer_behind(place, calls):
    calls.faults["write"] = failing_with(EIO)
    sources = [place.on_host(VALUES) for _ in range(10)]
    blocks = [place.tier.allocate(VALUES.numel(), VALUES.dtype) for _ in range(10)]
    transfers = [place.copy(*pair) for pair in zip(sources, blocks, strict=True)]
    for transfer in transfers:
        with pytest.raises(ShardwiseError, match="Errno 5"):
            transfer.wait()
    del calls.faults["write"]
    assert have_equal_bits(place.load(place.store(VALUES)), VALUES)


def test_a_read_of_a_block_that_was_never_written_is_an_error(place):
    block = place.tier.allocate(8, torch.float32)
    with pytest.raises(ShardwiseError, match="expected a block that was written"):
        place.load(block)


@pytest.mark.parametrize("code", [ENOSPC, EDQUOT], ids=["ENOSPC", "EDQUOT"])
def test_a_full_device_is_a_budget_error_at_allocation_with_nothing_changed(place, calls, code):
    block = place.store(VALUES)
    before = (place.tier.allocated_bytes, place.tier.peak_bytes, place.tier.file_bytes)
    calls.faults["reserve"] = failing_with(code)
    calls.faults["free_bytes"] = lambda *_: 77
    expected = r"room for 20480 bytes more .* \(77 bytes are free there\); free space"
    with pytest.raises(BudgetError, match=expected):
        place.tier.allocate(5003, torch.float32)
    after = (place.tier.allocated_bytes, place.tier.peak_bytes, place.tier.file_bytes)
    assert after == before
    assert have_equal_bits(place.load(block), VALUES)
    del calls.faults["reserve"]
    assert have_equal_bits(place.load(place.store(VALUES)), VALUES)


def test_an_almost_full_device_is_used_to_its_last_bytes(tmp_path):
    room_bytes = 3 * 4096
    lengths_bytes = []

    def reserve(real, descriptor, offset, num_bytes):
        if offset + num_bytes > room_bytes:
            real.reserve(descriptor, 0, room_bytes)  # a part, as the system may
            raise OSError(ENOSPC, "full")
        real.reserve(descriptor, offset, num_bytes)

    def truncate(real, descriptor, num_bytes):
        real.truncate(descriptor, num_bytes)
        lengths_bytes.append((os.fstat(descriptor).st_size, tier.file_bytes))

    calls = FaultyFileCalls(reserve=reserve, truncate=truncate)
    tier = DiskTier(DiskOptions(folder=tmp_path), calls=calls)
    for _ in range(3):
        tier.allocate(1024, torch.float32)
    with pytest.raises(BudgetError):
        tier.allocate(1, torch.float32)
    assert tier.file_bytes == tier.allocated_bytes == room_bytes
    assert lengths_bytes
    assert all(length == expected for length, expected in lengths_bytes)
    tier.close()


@pytest.mark.parametrize("position", [0, 8192 + 17, 5003 * 4 - 1])
def test_a_flipped_bit_is_found_and_its_place_named(place, calls, tmp_path, position):
    good, block = place.store(VALUES), place.store(VALUES)
    start = place.tier.footprint_bytes(5003, torch.float32)

    def flip(real, descriptor, view, offset):
        count = real.read(descriptor, view, offset)
        if offset <= start + position < offset + count:
            view[start + position - offset] ^= 1
        return count

    calls.faults["read"] = flip
    offset = start + position // 8192 * 8192
    with pytest.raises(CorruptedBlockError) as caught:
        place.load(block)
    assert f"disk tier, unnamed file in {tmp_path}" in str(caught.value)
    assert f"bytes at offset {offset} expected checksum" in str(caught.value)
    assert repr(block) in str(caught.value)
    assert have_equal_bits(place.load(good), VALUES)


def test_bytes_after_the_last_element_are_nobodys_and_not_checked(place, calls):
    block = place.store(VALUES)

    def flip_padding(real, descriptor, view, offset):
        count = real.read(descriptor, view, offset)
        if offset + count == place.tier.footprint_bytes(5003, torch.float32):
            view[-1] ^= 1
        return count

    calls.faults["read"] = flip_padding
    assert have_equal_bits(place.load(block), VALUES)


def test_nothing_of_earlier_blocks_is_written_after_the_last_element(place, calls):
    tails = []

    def note(real, descriptor, view, offset):
        tails.append(bytes(view[100:]))
        return real.write(descriptor, view, offset)

    place.store(VALUES)
    calls.faults["write"] = note
    place.store(VALUES[:25])
    assert tails == [bytes(4096 - 100)]


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_file_system_that_refuses_direct_calls_is_used_through_its_cache(tmp_path, call):
    is_direct = False

    def set_direct(_, __, *, is_direct: bool):
        state.append(is_direct)

    def refuse(real, *arguments):
        if state[-1]:
            raise OSError(EINVAL, "not here")
        return getattr(real, call)(*arguments)

    state = [is_direct]
    calls = FaultyFileCalls(set_direct=set_direct, **{call: refuse})
    tier = DiskTier(DiskOptions(folder=tmp_path, piece_bytes=8192), calls=calls)
    place = Place(tier, HostTier(), Copier(WorkerScheduler()))
    assert tier.is_direct
    assert have_equal_bits(place.load(place.store(VALUES)), VALUES)
    assert not tier.is_direct
    assert state == [False, True, False]
    place.copier.close()
    tier.close()


def test_a_file_system_without_direct_calls_is_used_through_its_cache(tmp_path):
    calls = FaultyFileCalls(set_direct=failing_with(EINVAL))
    tier = DiskTier(DiskOptions(folder=tmp_path), calls=calls)
    assert not tier.is_direct
    tier.close()


def test_an_invalid_call_through_the_cache_is_an_error(tmp_path):
    calls = FaultyFileCalls(write=failing_with(EINVAL))
    tier = DiskTier(DiskOptions(folder=tmp_path, use_direct=False), calls=calls)
    place = Place(tier, HostTier(), Copier(WorkerScheduler()))
    with pytest.raises(ShardwiseError, match="Errno 22"):
        place.store(VALUES)
    place.copier.close()
    tier.close()


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"folder of the disk tier .*nowhere"):
        DiskTier(DiskOptions(folder=tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "value"), [("piece_bytes", 5000), ("extent_bytes", 0), ("num_buffers", 0)]
)
def test_options_that_cannot_work_are_refused_by_name(tmp_path, name, value):
    with pytest.raises(ConfigurationError, match=rf"DiskOptions\.{name} expected"):
        DiskOptions(folder=tmp_path, **{name: value})
