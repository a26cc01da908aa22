"""Copies have the effects of the order they were asked for, and keep their errors for wait."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.tiers import Copier, HostTier, WorkerScheduler
from tests.kit.hostile import LateScheduler
from tests.unit.tiers.values import have_equal_bits, random_values


def test_a_chain_of_copies_arrives_whole_in_any_order_of_waits(place):
    values = random_values(5000, torch.float32)
    blocks = [place.on_host(values)]
    blocks += [
        tier.allocate(5000, torch.float32) for tier in (place.tier, place.host, place.tier) * 2
    ]
    transfers = [place.copy(blocks[index], blocks[index + 1]) for index in range(len(blocks) - 1)]
    for index in (5, 0, 3, 4, 2, 1):
        transfers[index].wait()
    assert have_equal_bits(place.load(blocks[-1]), values)


def test_a_block_is_not_overwritten_before_it_was_read(place):
    old, new = (random_values(5000, torch.float32, seed=seed) for seed in (1, 2))
    block, source = place.store(old), place.on_host(new)
    kept = place.host.allocate(5000, torch.float32)
    read = place.copy(block, kept)
    write = place.copy(source, block)
    write.wait()
    read.wait()
    assert have_equal_bits(kept.tensor, old)
    assert have_equal_bits(place.load(block), new)


def test_of_two_writes_the_later_one_stays(place):
    block = place.tier.allocate(5000, torch.float32)
    values = [random_values(5000, torch.float32, seed=seed) for seed in range(4)]
    transfers = [place.copy(place.on_host(one), block) for one in values]
    for transfer in reversed(transfers):
        transfer.wait()
    assert have_equal_bits(place.load(block), values[-1])


def test_many_threads_copy_many_blocks_without_mixing_them_up(open_place):
    place = open_place(budget_bytes=4 * 4 * 4096)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for turn in range(10):
                sizes = [choose.randrange(1, 1024) for _ in range(4)]
                values = [random_values(n, torch.float32, seed=seed * 100 + turn) for n in sizes]
                sources = [place.on_host(one) for one in values]
                blocks = [place.tier.allocate(n, torch.float32) for n in sizes]
                targets = [place.host.allocate(n, torch.float32) for n in sizes]
                inward = [place.copy(*pair) for pair in zip(sources, blocks, strict=True)]
                outward = [place.copy(*pair) for pair in zip(blocks, targets, strict=True)]
                for transfer in choose.sample(inward + outward, 8):
                    transfer.wait()
                for target, expected in zip(targets, values, strict=True):
                    assert have_equal_bits(target.tensor, expected)
                for block in blocks:
                    place.tier.free(block)
                for block in sources + targets:
                    place.host.free(block)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert place.tier.allocated_bytes == place.host.allocated_bytes == 0


class Refusal(Exception):
    """What the copies of these tests fail with."""


@pytest.fixture
def break_writes(place, monkeypatch):
    """Return a function that lets every write to the tier fail from then on."""

    def fail(*_):
        raise Refusal("device gone")

    return lambda: monkeypatch.setattr(place.tier, "write_pieces", fail)


def test_an_error_surfaces_at_each_wait_of_its_copy_and_nowhere_else(place, break_writes):
    good = place.store(torch.ones(8))
    break_writes()
    source, target = place.on_host(torch.ones(8)), place.tier.allocate(8, torch.float32)
    failing = place.copy(source, target)
    assert torch.equal(place.load(good), torch.ones(8))
    for _ in range(2):
        with pytest.raises(Refusal, match="device gone"):
            failing.wait()
    place.tier.free(target)
    place.host.free(source)
    assert torch.equal(place.load(good), torch.ones(8))


def test_what_depends_on_a_failed_copy_fails_and_names_it(place, break_writes):
    break_writes()
    source, middle = place.on_host(torch.ones(8)), place.tier.allocate(8, torch.float32)
    target = place.host.allocate(8, torch.float32)
    first, second = place.copy(source, middle), place.copy(middle, target)
    with pytest.raises(ShardwiseError, match="expected a source that was written") as caught:
        second.wait()
    assert isinstance(caught.value.__cause__, Refusal)
    with pytest.raises(Refusal):
        first.wait()


def test_a_block_may_be_used_after_its_failed_copy_was_waited_for(place, break_writes, monkeypatch):
    break_writes()
    source, block = place.on_host(torch.ones(8)), place.tier.allocate(8, torch.float32)
    with pytest.raises(Refusal):
        place.copy(source, block).wait()
    monkeypatch.undo()
    place.copy(source, block).wait()
    assert torch.equal(place.load(block), torch.ones(8))


def test_close_keeps_the_error_of_a_copy_for_its_wait(place, break_writes):
    break_writes()
    transfer = place.copy(place.on_host(torch.ones(8)), place.tier.allocate(8, torch.float32))
    place.copier.close()
    place.tier.close()
    with pytest.raises(Refusal):
        transfer.wait()


def test_a_copy_goes_on_beside_one_that_is_stuck_in_the_other_lane(tmp_path):
    from shardwise.tiers import DiskOptions, DiskTier
    from tests.unit.tiers.faulty import FaultyFileCalls

    is_let_go = threading.Event()

    def stuck(real, *arguments):
        assert is_let_go.wait(30)
        return real.write(*arguments)

    disk = DiskTier(DiskOptions(folder=tmp_path), calls=FaultyFileCalls(write=stuck))
    host, copier = HostTier(), Copier(WorkerScheduler(num_memory_workers=1, num_file_workers=1))
    source, other = host.allocate(8, torch.float32), host.allocate(8, torch.float32)
    source.tensor.fill_(3)
    to_disk = copier.copy(source, disk.allocate(8, torch.float32))
    copier.copy(source, other).wait()
    assert not to_disk.has_run
    assert torch.equal(other.tensor, torch.full((8,), 3.0))
    is_let_go.set()
    to_disk.wait()
    copier.close()
    disk.close()


@pytest.mark.parametrize("seed", range(5))
def test_random_programs_end_as_if_each_copy_ran_at_once(seed):
    choose = random.Random(seed)
    for make in (WorkerScheduler, lambda: LateScheduler(seed=seed, early_share=0.3)):
        host, copier = HostTier(), Copier(make())
        blocks = [host.allocate(300, torch.float32) for _ in range(4)]
        expected = list(range(4))
        for number, block in enumerate(blocks):
            block.tensor.fill_(number)
        transfers = []
        for _ in range(40):
            source, target = choose.sample(range(4), 2)
            transfers.append(copier.copy(blocks[source], blocks[target]))
            expected[target] = expected[source]
        for transfer in choose.sample(transfers, len(transfers)):
            transfer.wait()
        found = [block.tensor.unique().tolist() for block in blocks]
        assert found == [[float(number)] for number in expected]
        copier.close()
