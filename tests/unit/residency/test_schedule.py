"""Moves overlap with uses as the pace says, and whatever is wrong with a schedule is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import ConfigurationError
from shardwise.residency import (
    ChunkBytes,
    Limits,
    Pace,
    Purpose,
    Residency,
    Schedule,
    State,
    Tier,
    Trace,
    bound_staging,
    make_schedule,
    reside,
    simulate,
)
from tests.unit.residency.kit import paces, training_step, training_steps

MASTERS = ChunkBytes(
    whole_bytes=20, working_bytes=10, master_bytes=20, optimizer_bytes=40, gradient_bytes=10
)
PLAIN = replace(MASTERS, master_bytes=0)
HOMES = st.sampled_from(list(Tier))


def faults_of(
    schedule: Schedule, trace: Trace, residency: Residency, pace: Pace, limits=None
) -> tuple[str, ...]:
    limits = limits or Limits(disk_bytes=None)
    return simulate(schedule, trace, residency=residency, pace=pace, limits=limits).faults


@settings(max_examples=150, deadline=None)
@given(training_steps(), st.data())
def test_nothing_is_used_while_absent_wherever_slices_lie(trace: Trace, data) -> None:
    pace = data.draw(paces(trace.chunks))
    homes = [st.lists(HOMES, min_size=len(trace.chunks), max_size=len(trace.chunks))] * 2
    residency = reside(*(data.draw(tiers) for tiers in homes))
    schedule = make_schedule(trace, residency=residency, pace=pace)
    assert faults_of(schedule, trace, residency, pace) == ()


@settings(max_examples=100, deadline=None)
@given(training_steps(), st.data())
def test_copies_stay_below_their_bound(trace: Trace, data) -> None:
    pace = data.draw(paces(trace.chunks))
    tiers = [Tier.HOST, Tier.DISK] if data.draw(st.booleans()) else [Tier.HOST]
    homes = st.lists(st.sampled_from(tiers), min_size=len(trace.chunks), max_size=len(trace.chunks))
    residency = reside(data.draw(homes), data.draw(homes))
    account = simulate(
        make_schedule(trace, residency=residency, pace=pace),
        trace,
        residency=residency,
        pace=pace,
        limits=Limits(disk_bytes=None),
    )
    bound = bound_staging(trace.chunks, pace, has_updates_away=True, uses_disk=Tier.DISK in tiers)
    at_home = residency.bytes_in(Tier.HOST, trace.chunks)
    assert pace.gather_bytes is not None
    others = pace.gather_bytes + trace.peak_activation_bytes
    assert account.peak_bytes(Tier.ACCELERATOR) <= others + bound.accelerator_bytes
    assert account.peak_bytes(Tier.HOST) <= at_home + bound.host_bytes


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_updates_run_as_a_pipeline_of_bounded_depth(depth: int) -> None:
    trace = training_step((MASTERS,) * 6)
    residency = reside([Tier.ACCELERATOR] * 6, [Tier.HOST] * 6)
    pace = Pace(depth=depth, update_tier=Tier.ACCELERATOR)
    schedule = make_schedule(trace, residency=residency, pace=pace)
    first, stop = 12, 18
    masters = [move for move in schedule.moves if move.state.purpose is Purpose.MASTER]
    windows = sorted(
        (m.state.chunk, m.source.value, m.after_moment, m.before_moment) for m in masters
    )
    for chunk in range(6):
        at = first + chunk
        away, home = windows[2 * chunk : 2 * chunk + 2]
        assert away == (chunk, "accelerator", at, min(at + 1 + depth, stop))
        assert home == (chunk, "host", max(at - depth, first), at)


@pytest.mark.parametrize(
    ("working", "update", "update_tier", "expected_bytes"),
    [
        (Tier.ACCELERATOR, Tier.ACCELERATOR, Tier.HOST, {}),
        (Tier.ACCELERATOR, Tier.HOST, Tier.HOST, {"to host": 10, "from host": 10}),
        (Tier.HOST, Tier.HOST, Tier.HOST, {"to host": 10, "from host": 20}),
        (Tier.ACCELERATOR, Tier.HOST, Tier.ACCELERATOR, {"to host": 70, "from host": 70}),
        (Tier.HOST, Tier.ACCELERATOR, Tier.HOST, {"to host": 10, "from host": 20}),
    ],
    ids=["nothing moves", "host updates", "all on host", "staged", "only parameters on host"],
)
def test_bytes_moved_in_a_step_are_the_closed_form(
    working: Tier, update: Tier, update_tier: Tier, expected_bytes: dict[str, int]
) -> None:
    num_chunks = 4
    trace = training_step((MASTERS,) * num_chunks)
    residency = reside([working] * num_chunks, [update] * num_chunks)
    pace = Pace(update_tier=update_tier, gather_bytes=20)
    account = simulate(
        make_schedule(trace, residency=residency, pace=pace),
        trace,
        residency=residency,
        pace=pace,
        limits=Limits(),
    )
    moved = {
        "to host": account.moved_bytes.get((Tier.ACCELERATOR, Tier.HOST), 0),
        "from host": account.moved_bytes.get((Tier.HOST, Tier.ACCELERATOR), 0),
    }
    again = 10 if working is Tier.HOST else 0  # the last chunk stays from forward to backward
    expected = {"to host": 0, "from host": 0} | {
        k: v * num_chunks for k, v in expected_bytes.items()
    }
    assert moved == expected | {"from host": expected["from host"] - again}
    assert account.num_gathers == 2 * num_chunks - 1
    assert account.received_bytes == 10 * account.num_gathers


def test_an_update_without_masters_brings_the_working_slice() -> None:
    trace = training_step((PLAIN,) * 2)
    residency = reside([Tier.ACCELERATOR] * 2, [Tier.HOST] * 2)
    schedule = make_schedule(trace, residency=residency, pace=Pace())
    moved = [(m.source, m.target) for m in schedule.moves if m.state == State(1, Purpose.WORKING)]
    assert moved == [(Tier.ACCELERATOR, Tier.HOST), (Tier.HOST, Tier.ACCELERATOR)]


def test_bytes_on_their_way_between_disk_and_accelerator_pass_through_the_host() -> None:
    trace = training_step((replace(MASTERS, optimizer_bytes=0, master_bytes=0, gradient_bytes=0),))
    residency = reside([Tier.DISK], [Tier.ACCELERATOR])
    schedule = make_schedule(trace, residency=residency, pace=Pace())
    account = simulate(
        schedule, trace, residency=residency, pace=Pace(), limits=Limits(disk_bytes=None)
    )
    assert account.held_bytes[Tier.HOST] == (10, 0)


def test_the_bound_on_the_host_counts_slices_that_travel_for_gathers() -> None:
    trace = training_step((ChunkBytes(whole_bytes=10, working_bytes=10),) * 4)
    residency = reside([Tier.DISK] * 4, [Tier.ACCELERATOR] * 4)
    pace = Pace(prefetch_bytes=20)
    account = simulate(
        make_schedule(trace, residency=residency, pace=pace),
        trace,
        residency=residency,
        pace=pace,
        limits=Limits(disk_bytes=None),
    )
    bound = bound_staging(trace.chunks, pace, has_updates_away=False, uses_disk=True)
    assert account.peak_bytes(Tier.HOST) == bound.host_bytes == 30


def test_the_account_counts_everything_that_a_tier_holds() -> None:
    trace = training_step((MASTERS, MASTERS), activation_bytes=100)
    residency = reside([Tier.HOST, Tier.ACCELERATOR], [Tier.ACCELERATOR, Tier.HOST])
    pace = Pace(depth=0, gather_bytes=20)
    account = simulate(
        make_schedule(trace, residency=residency, pace=pace),
        trace,
        residency=residency,
        pace=pace,
        limits=Limits(),
        resident_bytes=1000,
    )
    base = 1000 + 10 + 70
    assert account.held_bytes[Tier.ACCELERATOR] == (
        base + 100 + 20,  # forward
        base + 200 + 20,
        base + 200 + 20 + 10,  # the gradient of chunk 1, on its way to the host
        base + 100 + 20,
        base + 10,  # the new working slice of chunk 0, likewise
        base,
    )
    assert account.held_bytes[Tier.HOST] == (80, 80, 80, 80, 80, 90)


BROKEN = {
    "a move away": "not where it is updated|without its slice",
    "a move home": "written and lost",
    "a copy": "not where it is updated|written and lost",
    "a gather": "read while absent",
}


@pytest.mark.parametrize("what", BROKEN)
@settings(deadline=None)
@given(data=st.data())
def test_a_schedule_with_a_part_missing_is_found_out(what: str, data) -> None:
    trace = training_step((MASTERS, PLAIN, MASTERS))
    residency = reside([Tier.HOST, Tier.ACCELERATOR, Tier.DISK], [Tier.HOST] * 3)
    pace = Pace(update_tier=Tier.ACCELERATOR)
    schedule = make_schedule(trace, residency=residency, pace=pace)
    parts = {
        "a move away": [m for m in schedule.moves if m.source is residency.homes[m.state]],
        "a move home": [m for m in schedule.moves if m.target is residency.homes[m.state]],
        "a copy": list(schedule.stays),
        "a gather": list(schedule.gathers),
    }[what]
    missing = data.draw(st.sampled_from(parts))
    broken = Schedule(
        gathers=tuple(g for g in schedule.gathers if g is not missing),
        moves=tuple(m for m in schedule.moves if m is not missing),
        stays=tuple(s for s in schedule.stays if s is not missing),
    )
    [fault, *_] = faults_of(broken, trace, residency, pace)
    assert any(words in fault for words in BROKEN[what].split("|"))


def delay(schedule: Schedule, purpose: Purpose, *, until: int) -> Schedule:
    """Let what was written before a moment arrive home only then."""

    def is_late(state: State, source: Tier, after: int) -> bool:
        return (state.purpose, source) == (purpose, Tier.ACCELERATOR) and after < until

    return replace(
        schedule,
        moves=tuple(
            replace(m, before_moment=until) if is_late(m.state, m.source, m.after_moment) else m
            for m in schedule.moves
        ),
        stays=tuple(
            replace(s, until_moment=max(s.until_moment, until))
            if is_late(s.state, s.tier, s.after_moment)
            else s
            for s in schedule.stays
        ),
    )


@pytest.mark.parametrize("update_tier", [Tier.HOST, Tier.ACCELERATOR])
def test_a_gradient_that_is_not_home_in_time_is_found_out(update_tier: Tier) -> None:
    trace = training_step((MASTERS, MASTERS))
    residency = reside([Tier.HOST] * 2, [Tier.HOST] * 2)
    pace = Pace(depth=0, update_tier=update_tier)
    schedule = delay(
        make_schedule(trace, residency=residency, pace=pace), Purpose.GRADIENT, until=6
    )
    assert faults_of(schedule, trace, residency, pace) == (
        "moment 4: the gradient slice of chunk 0 is not where it is updated",
        "moment 5: the gradient slice of chunk 1 is not where it is updated",
    )


def test_a_working_slice_that_is_not_home_before_its_gather_is_found_out() -> None:
    step = training_step((MASTERS,))
    trace = replace(step, moments=step.moments * 2)
    residency = reside([Tier.HOST], [Tier.HOST])
    pace = Pace(depth=0, update_tier=Tier.ACCELERATOR)
    schedule = make_schedule(trace, residency=residency, pace=pace)
    assert faults_of(schedule, trace, residency, pace) == ()
    late = delay(schedule, Purpose.WORKING, until=4)
    assert faults_of(late, trace, residency, pace) == (
        "moment 3: chunk 0 is gathered without its slice",
    )


def test_values_from_before_an_update_are_found_out() -> None:
    step = training_step((MASTERS,))
    trace = replace(step, moments=step.moments * 2)
    residency = reside([Tier.ACCELERATOR], [Tier.ACCELERATOR])
    schedule = make_schedule(trace, residency=residency, pace=Pace())
    kept = replace(schedule, gathers=(replace(schedule.gathers[0], until_moment=6),))
    assert faults_of(kept, trace, residency, Pace()) == (
        "moment 3: chunk 0 is read with values from before an update",
        "moment 4: chunk 0 is read with values from before an update",
    )


def test_a_limit_that_is_crossed_is_found_out() -> None:
    trace = training_step((MASTERS,))
    residency = reside([Tier.ACCELERATOR], [Tier.ACCELERATOR])
    schedule = make_schedule(trace, residency=residency, pace=Pace())
    limits = Limits(accelerator_bytes=99)
    faults = faults_of(schedule, trace, residency, Pace(), limits)
    assert faults == (
        "moment 0: the accelerator holds 100 bytes, limit 99",
        "moment 1: the accelerator holds 100 bytes, limit 99",
    )
    assert faults_of(schedule, trace, residency, Pace(), Limits(accelerator_bytes=100)) == ()


@pytest.mark.parametrize(
    "options", [{"depth": -1}, {"prefetch_bytes": -1}, {"update_tier": Tier.DISK}], ids=str
)
def test_a_pace_that_cannot_be_kept_is_refused(options) -> None:
    with pytest.raises(ConfigurationError, match="Pace"):
        Pace(**options)
