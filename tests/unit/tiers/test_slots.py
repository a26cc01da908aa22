"""Free space of a file: every byte is handed out once, and neighbours join."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwise.tiers.slots import FreeSpace, Run, locate


def test_neighbours_join_on_both_sides():
    space = FreeSpace()
    for run in (Run(0, 10), Run(20, 30), Run(10, 20)):
        space.add(run)
    assert space.runs == (Run(0, 30),)


def test_the_run_that_fits_best_is_cut():
    space = FreeSpace()
    for run in (Run(0, 50), Run(60, 80), Run(90, 130)):
        space.add(run)
    assert space.take(20) == (Run(60, 80),)
    assert space.take(30) == (Run(90, 120),)


def test_several_runs_are_used_where_no_single_one_fits():
    space = FreeSpace()
    for run in (Run(0, 10), Run(20, 50), Run(60, 80)):
        space.add(run)
    assert space.take(55) == (Run(20, 50), Run(60, 80), Run(0, 5))
    assert space.runs == (Run(5, 10),)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_every_byte_is_free_or_handed_out_once(steps):
    space, held = FreeSpace(), []
    space.add(Run(0, 200))
    for is_take, number in steps:
        if is_take and number <= space.free_bytes:
            held.append(space.take(number))
            assert sum(run.num_bytes for run in held[-1]) == number
        elif held:
            for run in held.pop(number % len(held)):
                space.add(run)
        everything = sorted([*space.runs, *itertools.chain.from_iterable(held)])
        assert [run.start for run in everything[1:]] == [run.stop for run in everything[:-1]]
        assert (everything[0].start, everything[-1].stop) == (0, 200)
        gaps = zip(space.runs, space.runs[1:], strict=False)
        assert all(left.stop < right.start for left, right in gaps)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 30), st.integers(0, 30))
def test_a_part_of_a_block_is_found_in_its_runs(lengths, position, num_bytes):
    starts = [100 * index for index in range(len(lengths))]
    runs = [Run(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    addresses = [address for run in runs for address in range(run.start, run.stop)]
    found = [
        address
        for run in locate(runs, position, num_bytes)
        for address in range(run.start, run.stop)
    ]
    assert found == addresses[position : position + num_bytes]
