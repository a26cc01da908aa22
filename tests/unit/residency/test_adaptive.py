"""A budget is used as far as it goes and never crossed, and what would do is known exactly."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import BudgetError
from shardwise.residency import (
    ChunkBytes,
    Limits,
    Needs,
    Pace,
    Purpose,
    Residency,
    Tier,
    Trace,
    adapt,
    make_schedule,
    simulate,
    smallest_budget,
    spare_bytes,
)
from tests.unit.residency.kit import chunk_sizes, paces, training_step, training_steps


@st.composite
def situations(draw: st.DrawFn, *, is_measured: bool = True):
    """A step, and what there is beside the accelerator's limit."""
    trace: Trace = draw(training_steps())
    pace: Pace = draw(paces(trace.chunks))
    total = sum(c.working_bytes + c.update_bytes for c in trace.chunks)
    tier = st.one_of(st.none(), st.integers(0, 2 * total))
    limits = Limits(host_bytes=draw(tier), disk_bytes=draw(st.one_of(st.just(0), tier)))
    assert pace.gather_bytes is not None
    needs = Needs(
        resident_bytes=draw(st.integers(0, 5)),
        gather_bytes=pace.gather_bytes,
        activation_bytes=trace.peak_activation_bytes if is_measured else None,
        update_share=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
    )
    return trace, limits, needs, pace


def account_of(trace: Trace, residency: Residency, limits: Limits, needs: Needs, pace: Pace):
    return simulate(
        make_schedule(trace, residency=residency, pace=pace),
        trace,
        residency=residency,
        pace=pace,
        limits=limits,
        resident_bytes=needs.resident_bytes,
    )


@settings(max_examples=150, deadline=None)
@given(situations(), st.integers(0, 60))
def test_no_tier_ever_holds_more_than_its_limit(situation, more_bytes: int) -> None:
    trace, limits, needs, pace = situation
    least = smallest_budget(trace.chunks, limits=limits, needs=needs, pace=pace)
    limits = replace(limits, accelerator_bytes=least + more_bytes)
    residency = adapt(trace.chunks, limits=limits, needs=needs, pace=pace)
    assert account_of(trace, residency, limits, needs, pace).faults == ()


@settings(max_examples=100, deadline=None)
@given(situations() | situations(is_measured=False))
def test_one_byte_less_than_the_smallest_budget_is_too_little(situation) -> None:
    trace, limits, needs, pace = situation
    least = smallest_budget(trace.chunks, limits=limits, needs=needs, pace=pace)
    enough = replace(limits, accelerator_bytes=least)
    adapt(trace.chunks, limits=enough, needs=needs, pace=pace)
    with pytest.raises(BudgetError):
        adapt(
            trace.chunks,
            limits=replace(limits, accelerator_bytes=least - 1),
            needs=needs,
            pace=pace,
        )


@settings(max_examples=100, deadline=None)
@given(situations(), st.integers(0, 60), st.integers(0, 200))
def test_more_room_never_moves_more_bytes(situation, bytes_above: int, more_bytes: int) -> None:
    trace, limits, needs, pace = situation
    least = smallest_budget(trace.chunks, limits=limits, needs=needs, pace=pace)
    moved = []
    for budget_bytes in (least + bytes_above, least + bytes_above + more_bytes, None):
        limits = replace(limits, accelerator_bytes=budget_bytes)
        residency = adapt(trace.chunks, limits=limits, needs=needs, pace=pace)
        moved.append(account_of(trace, residency, limits, needs, pace).total_moved_bytes)
    assert moved[0] >= moved[1] >= moved[2] == 0


@settings(max_examples=100, deadline=None)
@given(situations(), st.integers(1, 200))
def test_the_change_that_an_error_names_would_do(situation, short_bytes: int) -> None:
    trace, limits, needs, pace = situation
    least = smallest_budget(trace.chunks, limits=limits, needs=needs, pace=pace)
    limits = replace(limits, accelerator_bytes=max(0, least - short_bytes))
    with pytest.raises(BudgetError) as caught:
        adapt(trace.chunks, limits=limits, needs=needs, pace=pace)
    advice = re.findall(r"Budget\.(\w+) to (\d+) bytes", str(caught.value))
    assert 1 <= len(advice) <= 2
    for tier, need_bytes in advice:
        raised = replace(limits, **{f"{tier}_bytes": int(need_bytes)})
        adapt(trace.chunks, limits=raised, needs=needs, pace=pace)


@settings(deadline=None)
@given(situations(is_measured=False), st.integers(0, 60))
def test_before_activations_are_measured_no_more_stays_than_must(
    situation, more_bytes: int
) -> None:
    trace, limits, needs, pace = situation
    least = smallest_budget(trace.chunks, limits=limits, needs=needs, pace=pace)
    found = {
        tuple(
            adapt(
                trace.chunks,
                limits=replace(limits, accelerator_bytes=least + more),
                needs=needs,
                pace=pace,
            ).homes.items()
        )
        for more in (0, more_bytes)
    }
    assert len(found) == 1


@settings(deadline=None)
@given(situations(), st.integers(0, 60))
def test_what_is_spare_can_keep_gathered_chunks(situation, more_bytes: int) -> None:
    trace, limits, needs, pace = situation
    least = smallest_budget(trace.chunks, limits=limits, needs=needs, pace=pace)
    limits = replace(limits, accelerator_bytes=least + more_bytes)
    residency = adapt(trace.chunks, limits=limits, needs=needs, pace=pace)
    spare = spare_bytes(trace.chunks, residency, limits=limits, needs=needs, pace=pace)
    assert spare is not None
    assert spare >= 0
    assert pace.gather_bytes is not None
    larger = replace(pace, gather_bytes=pace.gather_bytes + spare)
    account = account_of(trace, residency, limits, needs, larger)
    assert not [fault for fault in account.faults if "accelerator" in fault]


def test_spare_bytes_save_the_gathers_of_backward() -> None:
    chunks = (ChunkBytes(whole_bytes=10, working_bytes=5, master_bytes=10, gradient_bytes=5),) * 4
    trace, pace = training_step(chunks), Pace(gather_bytes=10)
    needs = Needs(gather_bytes=10, activation_bytes=0)
    limits = Limits(accelerator_bytes=10 + 4 * 20 + 30)
    residency = adapt(chunks, limits=limits, needs=needs, pace=pace)
    spare = spare_bytes(chunks, residency, limits=limits, needs=needs, pace=pace)
    assert spare == 30
    larger = replace(pace, gather_bytes=10 + spare)
    accounts = [account_of(trace, residency, limits, needs, p) for p in (pace, larger)]
    assert [account.num_gathers for account in accounts] == [7, 4]
    assert all(account.faults == () for account in accounts)
    unlimited = spare_bytes(chunks, residency, limits=Limits(), needs=needs, pace=pace)
    assert unlimited is None


@settings(deadline=None)
@given(chunk_sizes(), st.integers(0, 200))
def test_working_slices_stay_before_what_updates_take(
    chunks: tuple[ChunkBytes, ...], budget_bytes: int
) -> None:
    needs, pace = Needs(activation_bytes=0), Pace(depth=0)
    least = smallest_budget(chunks, limits=Limits(), needs=needs, pace=pace)
    limits = Limits(accelerator_bytes=least + budget_bytes)
    residency = adapt(chunks, limits=limits, needs=needs, pace=pace)
    has_kept_update = any(
        c.update_bytes and residency.update_home(i) is Tier.ACCELERATOR
        for i, c in enumerate(chunks)
    )
    has_working_away = any(
        residency.home(i, Purpose.WORKING) is not Tier.ACCELERATOR
        for i, c in enumerate(chunks)
        if c.master_bytes
    )
    assert not (has_kept_update and has_working_away)


def test_a_share_of_the_margin_limits_what_updates_keep() -> None:
    chunks = (ChunkBytes(working_bytes=2, master_bytes=4, optimizer_bytes=6),) * 10
    limits = Limits(accelerator_bytes=20 + 100)

    def num_kept(share: float) -> int:
        needs = Needs(activation_bytes=0, update_share=share)
        residency = adapt(chunks, limits=limits, needs=needs, pace=Pace())
        return sum(residency.update_home(i) is Tier.ACCELERATOR for i in range(10))

    assert [num_kept(share) for share in (0.0, 0.25, 0.5, 1.0)] == [0, 2, 5, 10]


def test_an_empty_accelerator_keeps_everything() -> None:
    chunks = (ChunkBytes(working_bytes=2, master_bytes=4, optimizer_bytes=8),) * 3
    limits = Limits(accelerator_bytes=42)
    residency = adapt(chunks, limits=limits, needs=Needs(activation_bytes=0), pace=Pace())
    assert set(residency.homes.values()) == {Tier.ACCELERATOR}


def test_what_does_not_fit_on_the_host_goes_to_disk_the_least_valuable_first() -> None:
    chunks = (ChunkBytes(working_bytes=2, master_bytes=4),) * 4
    pace = Pace(depth=0)
    limits = Limits(accelerator_bytes=4, host_bytes=(4 + 4) + (6 + 6), disk_bytes=None)
    residency = adapt(chunks, limits=limits, needs=Needs(activation_bytes=0), pace=pace)
    homes = [residency.home(i, Purpose.WORKING) for i in range(4)]
    assert homes == [Tier.ACCELERATOR, Tier.ACCELERATOR, Tier.HOST, Tier.HOST]
    assert [residency.update_home(i) for i in range(4)] == [Tier.HOST, *[Tier.DISK] * 3]


def test_the_disk_is_filled_to_its_limit_and_no_further() -> None:
    chunks = (ChunkBytes(working_bytes=2, master_bytes=4),) * 4
    needs, pace = Needs(activation_bytes=0), Pace(depth=0)
    limits = Limits(accelerator_bytes=8, host_bytes=12, disk_bytes=16)
    residency = adapt(chunks, limits=limits, needs=needs, pace=pace)
    assert residency.bytes_in(Tier.DISK, chunks) == 16
    with pytest.raises(BudgetError, match=r"the disk tier .*; raise Budget\.disk to 16 bytes"):
        adapt(chunks, limits=replace(limits, disk_bytes=15), needs=needs, pace=pace)


def test_an_error_names_tier_need_limit_and_the_cheapest_change() -> None:
    chunks = (ChunkBytes(working_bytes=2, master_bytes=4),) * 4
    limits = Limits(accelerator_bytes=10, host_bytes=5)
    with pytest.raises(BudgetError) as caught:
        adapt(chunks, limits=limits, needs=Needs(resident_bytes=2), pace=Pace(depth=0))
    assert str(caught.value) == (
        "the host tier expected at least 18 bytes but got a limit of 5 bytes (2 bytes of the "
        "accelerator's 10 are needed beside slices); raise Budget.host to 18 bytes, or "
        "Budget.accelerator to 26 bytes."
    )
    with pytest.raises(BudgetError, match="the accelerator tier expected at least 2 bytes"):
        adapt(
            chunks,
            limits=Limits(accelerator_bytes=1),
            needs=Needs(resident_bytes=2),
            pace=Pace(depth=0),
        )
