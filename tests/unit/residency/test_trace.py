"""A trace answers what comes next as the uses themselves do, and says when to plan anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import LayoutError
from shardwise.residency import ChunkBytes, Moment, Segment, Trace, renew
from shardwise.runtime import uses as runtime_uses
from tests.unit.residency.kit import same_size_trace, training_step, training_steps

ORDERS = st.lists(st.integers(0, 4), min_size=1, max_size=15)


@settings(deadline=None)
@given(ORDERS, st.data())
def test_the_next_use_is_found_around_the_end_of_the_step(uses: list[int], data) -> None:
    trace = same_size_trace(uses, repeats=True)
    at = data.draw(st.integers(0, len(uses) - 1))
    for chunk in range(max(uses) + 1):
        twice = [*uses, *uses]
        expected = next((d for d in range(1, len(uses) + 1) if twice[at + d] == chunk), None)
        assert trace.next_use(chunk, at=at) == expected
        assert trace.next_read(chunk, at=at) == expected


@settings(deadline=None)
@given(ORDERS)
def test_a_pass_is_foreseen_as_a_recorded_order_does(uses: list[int]) -> None:
    apart = [chunk for i, chunk in enumerate(uses) if i == 0 or uses[i - 1] != chunk]
    trace = same_size_trace(apart)
    names = [object() for _ in range(max(apart) + 1)]
    order: runtime_uses.UseOrder[object] = runtime_uses.UseOrder()
    for _ in range(2):
        order.begin(runtime_uses.Segment.FORWARD)
        for at, chunk in enumerate(apart):
            order.note(names[chunk])
            if order.is_predicting:
                assert [names[c] for _, c in trace.upcoming(at=at)] == order.upcoming()
                for other, name in enumerate(names):
                    assert trace.next_read(other, at=at) == order.next_use(name)


@settings(deadline=None)
@given(training_steps())
def test_nothing_gathered_is_of_use_after_an_update(trace: Trace) -> None:
    update = min(i for i, m in enumerate([*trace.moments, None]) if not m or m[1] is Segment.UPDATE)
    for at in range(len(trace)):
        reads = [(at + d, c) for d, c in trace.upcoming(at=at)]
        if at < update < len(trace):
            assert all(moment < update for moment, _ in reads)
        for chunk in range(len(trace.chunks)):
            first = next((moment - at for moment, c in reads if c == chunk), None)
            assert trace.next_read(chunk, at=at) == first


def test_an_evaluation_in_between_shifts_nothing() -> None:
    step = training_step((ChunkBytes(whole_bytes=1, gradient_bytes=1),) * 3)
    before = [step.next_use(0, at=at) for at in range(len(step))]
    evaluation = same_size_trace([2, 1, 0])
    assert list(evaluation.upcoming(at=0)) == [(1, 1), (2, 0)]
    assert [step.next_use(0, at=at) for at in range(len(step))] == before


def test_first_visits_are_in_order_and_once() -> None:
    trace = replace(same_size_trace([2, 0, 2, 3, 0]), chunks=(ChunkBytes(),) * 5)
    assert trace.first_visits == (2, 0, 3)


def test_passes_are_runs_of_one_segment() -> None:
    step = training_step((ChunkBytes(gradient_bytes=1),) * 2)
    assert step.passes() == [range(2), range(2, 4), range(4, 6)]
    assert same_size_trace([]).passes() == []


def test_a_trace_that_still_holds_is_kept() -> None:
    chunks = (ChunkBytes(whole_bytes=4),) * 2
    recorded = training_step(chunks, activation_bytes=5)
    assert renew(recorded, training_step(chunks, activation_bytes=5)) is recorded
    assert renew(recorded, training_step(chunks, activation_bytes=3)) is recorded


def test_larger_activations_raise_the_bytes_of_their_moments_only() -> None:
    recorded = training_step((ChunkBytes(whole_bytes=4),) * 2, activation_bytes=5)
    grown = recorded.moments[1]._replace(activation_bytes=99)
    shrunk = recorded.moments[0]._replace(activation_bytes=1)
    seen = replace(recorded, moments=(shrunk, grown, *recorded.moments[2:]))
    renewed = renew(recorded, seen)
    assert renewed.moments == (recorded.moments[0], grown, *recorded.moments[2:])
    assert renew(renewed, recorded) is renewed


@pytest.mark.parametrize("what", ["order", "sizes", "length", "segment", "nothing recorded"])
def test_another_step_is_recorded_anew(what: str) -> None:
    chunks = (ChunkBytes(whole_bytes=4),) * 2
    recorded = training_step(chunks)
    seen = {
        "order": replace(recorded, moments=recorded.moments[::-1]),
        "sizes": training_step((ChunkBytes(whole_bytes=5),) * 2),
        "length": replace(recorded, moments=recorded.moments[:-1]),
        "segment": replace(
            recorded, moments=(*recorded.moments[:-1], Moment(0, Segment.EVALUATION))
        ),
        "nothing recorded": recorded,
    }[what]
    assert renew(None if what == "nothing recorded" else recorded, seen) is seen


def test_a_use_of_an_unknown_chunk_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"chunks from 0 to 0 but got 1 \(moment 0\)"):
        Trace(chunks=(ChunkBytes(),), moments=(Moment(1, Segment.FORWARD),))
