"""Furthest next use needs the fewest gathers, and looking ahead costs none."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.residency import (
    ChunkBytes,
    Foresight,
    Gathered,
    Prefetch,
    Room,
    Segment,
    Trace,
    choose_prefetches,
    choose_victims,
    foretell_gathers,
)
from tests.unit.residency.kit import same_size_trace, training_step, training_steps

USES = st.lists(st.integers(0, 4), min_size=1, max_size=11)


def whole_bytes_by_moment(trace: Trace, gathers) -> list[int]:
    return [
        sum(
            trace.chunks[g.chunk].whole_bytes
            for g in gathers
            if g.after_moment <= at < g.until_moment
        )
        for at in range(len(trace))
    ]


def least_gathers(uses: tuple[int, ...], capacity: int) -> int:
    """The fewest gathers of any choice of victims, by trying all."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        chunk = uses[at]
        if chunk in held:
            return best(at + 1, held)
        if len(held) < capacity:
            return 1 + best(at + 1, held | {chunk})
        return 1 + min(best(at + 1, held - {victim} | {chunk}) for victim in held)

    return best(0, frozenset())


@settings(max_examples=100, deadline=None)
@given(uses=USES, capacity=st.integers(1, 4), prefetch_bytes=st.integers(0, 5))
def test_no_choice_of_victims_needs_fewer_gathers(
    uses: list[int], capacity: int, prefetch_bytes: int
) -> None:
    gathers = foretell_gathers(
        same_size_trace(uses), limit_bytes=capacity, prefetch_bytes=prefetch_bytes
    )
    assert len(gathers) == least_gathers(tuple(uses), capacity)


@settings(max_examples=150, deadline=None)
@given(training_steps(), st.data())
def test_looking_ahead_adds_no_gather_and_stays_below_the_limit(trace: Trace, data) -> None:
    sizes = [chunk.whole_bytes for chunk in trace.chunks]
    limit_bytes = data.draw(st.integers(max(sizes), sum(sizes) + 1))
    prefetch_bytes = data.draw(st.integers(0, sum(sizes)))
    on_demand = foretell_gathers(trace, limit_bytes=limit_bytes)
    ahead = foretell_gathers(trace, limit_bytes=limit_bytes, prefetch_bytes=prefetch_bytes)

    def uses_of(gathers) -> list[tuple[int, int]]:
        return sorted((g.before_moment, g.chunk) for g in gathers)

    assert uses_of(ahead) == uses_of(on_demand)
    assert max(whole_bytes_by_moment(trace, ahead)) <= limit_bytes
    assert all(g.after_moment == g.before_moment < g.until_moment for g in on_demand)


@settings(deadline=None)
@given(training_steps(), st.data())
def test_every_read_finds_its_chunk_whole_and_no_gather_outlives_an_update(
    trace: Trace, data
) -> None:
    sizes = [chunk.whole_bytes for chunk in trace.chunks]
    gathers = foretell_gathers(
        trace,
        limit_bytes=data.draw(st.integers(1, max(1, sum(sizes)))),
        prefetch_bytes=data.draw(st.integers(0, sum(sizes))),
    )
    for at, moment in enumerate(trace.moments):
        whole = [g.chunk for g in gathers if g.before_moment <= at < g.until_moment]
        if moment.segment is Segment.UPDATE:
            assert whole == []
        else:
            assert whole.count(moment.chunk) == (sizes[moment.chunk] > 0)


@pytest.mark.parametrize(
    ("limit_bytes", "num_gathers"), [(1, 9), (2, 8), (3, 7), (5, 5), (math.inf, 5)], ids=str
)
def test_chunks_stay_from_forward_to_backward_as_far_as_the_limit_allows(
    limit_bytes: float, num_gathers: int
) -> None:
    trace = training_step((ChunkBytes(whole_bytes=1, gradient_bytes=1),) * 5)
    assert len(foretell_gathers(trace, limit_bytes=limit_bytes)) == num_gathers


def test_a_sweep_gathers_the_next_chunk_while_one_is_used() -> None:
    trace = training_step((ChunkBytes(whole_bytes=1, gradient_bytes=1),) * 6)
    gathers = foretell_gathers(trace, limit_bytes=3, prefetch_bytes=1)
    hidden = [g for g in gathers if g.after_moment == g.before_moment - 1]
    assert len(hidden) == len(gathers) - 1  # all but the first of the step


def held(*chunks: int, pinned: int | None = None) -> list[Gathered]:
    return [Gathered(chunk, 1, is_pinned=chunk == pinned) for chunk in chunks]


def test_without_foresight_the_least_recently_used_go() -> None:
    room = choose_victims(held(3, 1, 2), needed_bytes=2, limit_bytes=3)
    assert room == Room((3, 1), fits=True)


def test_what_is_never_read_again_goes_before_what_is() -> None:
    foresight = Foresight(same_size_trace([0, 1, 2]), at=0)
    room = choose_victims(held(2, 0, 1), needed_bytes=1, limit_bytes=2, foresight=foresight)
    assert room == Room((0, 2), fits=True)


def test_what_is_pinned_stays() -> None:
    room = choose_victims(held(0, 1, pinned=0), needed_bytes=1, limit_bytes=2)
    assert room == Room((1,), fits=True)
    room = choose_victims(held(0, pinned=0), needed_bytes=1, limit_bytes=1)
    assert room == Room((), fits=False)


def test_what_is_read_sooner_than_the_newcomer_stays() -> None:
    foresight = Foresight(same_size_trace([0, 1, 2, 3]), at=0)
    room = choose_victims(
        held(1, 2, 3), needed_bytes=2, limit_bytes=2, foresight=foresight, beyond=2
    )
    assert room == Room((3,), fits=False)


def test_no_more_go_than_must() -> None:
    sizes = [Gathered(0, 1), Gathered(1, 8), Gathered(2, 8)]
    assert choose_victims(sizes, needed_bytes=4, limit_bytes=21) == Room((), fits=True)
    assert choose_victims(sizes, needed_bytes=5, limit_bytes=21) == Room((0,), fits=True)
    assert choose_victims(sizes, needed_bytes=6, limit_bytes=21) == Room((0, 1), fits=True)


def test_a_prefetch_replaces_only_what_is_not_read_until_then() -> None:
    foresight = Foresight(same_size_trace([0, 1, 2, 0]), at=0)
    found = choose_prefetches(
        held(1, 0, pinned=0), foresight=foresight, limit_bytes=2, prefetch_bytes=9
    )
    assert found == ()  # 1 may go once it was read; 0 would have to come back
    found = choose_prefetches(
        held(3, 1, 0, pinned=0),
        foresight=foresight_of([0, 1, 2, 0, 3]),
        limit_bytes=3,
        prefetch_bytes=9,
    )
    assert found == ()
    found = choose_prefetches(
        held(3, 1, 0, pinned=0),
        foresight=foresight_of([0, 1, 2, 0, 1, 3]),
        limit_bytes=3,
        prefetch_bytes=9,
    )
    assert found == (Prefetch(2, victims=(3,)),)


def foresight_of(uses: list[int]) -> Foresight:
    return Foresight(same_size_trace(uses), at=0)


def test_a_prefetch_replaces_the_least_recently_used_of_then() -> None:
    found = choose_prefetches(
        held(2, 1, 0, pinned=0), foresight=foresight_of([0, 2, 3]), limit_bytes=3, prefetch_bytes=9
    )
    assert found == (Prefetch(3, victims=(1,)),)  # 2 will be more recent


@pytest.mark.parametrize(("prefetch_bytes", "chunks"), [(0, []), (1, []), (2, [2]), (3, [2, 3])])
def test_bytes_of_chunks_that_are_there_count_towards_the_distance(
    prefetch_bytes: int, chunks: list[int]
) -> None:
    found = choose_prefetches(
        held(1, 0, pinned=0),
        foresight=foresight_of([0, 1, 2, 3]),
        limit_bytes=math.inf,
        prefetch_bytes=prefetch_bytes,
    )
    assert [prefetch.chunk for prefetch in found] == chunks
