"""Replay a schedule and account for it: bytes by tier and moment, bytes moved, and what is wrong.

It trusts nothing that made the schedule: what is used must be there, what was written must go home
before anyone reads it there, and no limit may be crossed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from shardwise.residency.schedule import update_tier
from shardwise.residency.state import UPDATE_PURPOSES, Purpose, State, Tier
from shardwise.residency.trace import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardwise.residency.schedule import Move, Schedule, Stay
    from shardwise.residency.staging import Pace
    from shardwise.residency.state import Limits, Residency
    from shardwise.residency.trace import Trace

Link: TypeAlias = tuple[Tier, Tier]
"""Source and target of copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one step costs."""

    held_bytes: Mapping[Tier, tuple[int, ...]]
    """Bytes in each tier at every moment."""
    moved_bytes: Mapping[Link, int]
    """Bytes copied over each link in the step."""
    num_gathers: int
    received_bytes: int
    """Bytes of gathers that come from other ranks."""
    faults: tuple[str, ...]
    """What is wrong, in order of moments; empty for a schedule that works."""

    def peak_bytes(self, tier: Tier) -> int:
        """Return the most bytes that a tier holds at any moment."""
        return max(self.held_bytes[tier], default=0)

    @property
    def total_moved_bytes(self) -> int:
        """Bytes copied over all links."""
        return sum(self.moved_bytes.values())


def simulate(
    schedule: Schedule,
    trace: Trace,
    *,
    residency: Residency,
    pace: Pace,
    limits: Limits,
    resident_bytes: int = 0,
) -> Account:
    """Return the account of one step.

    Args:
        schedule: What to replay.
        trace: The step.
        residency: Where slices lie between uses.
        pace: Tells where updates run.
        limits: What each tier may hold.
        resident_bytes: What lies on the accelerator at all moments and in no chunk.
    """
    held = _account_bytes(schedule, trace, residency, resident_bytes)
    crossed = (
        (at, f"the {tier.value} holds {held_bytes} bytes, limit {limit_bytes}")
        for tier, row in held.items()
        if (limit_bytes := limits.of(tier)) is not None
        for at, held_bytes in enumerate(row)
        if held_bytes > limit_bytes
    )
    inspection = _Inspection(schedule, trace, residency, pace)
    faults = sorted([*crossed, *inspection.faults()])
    moved: Counter[Link] = Counter()
    for move in schedule.moves:
        size_bytes = trace.chunks[move.state.chunk].slice_bytes(move.state.purpose)
        moved[move.source, move.target] += size_bytes
    gathered = [trace.chunks[gather.chunk] for gather in schedule.gathers]
    return Account(
        held_bytes=MappingProxyType(held),
        moved_bytes=MappingProxyType(dict(moved)),
        num_gathers=len(gathered),
        received_bytes=sum(sizes.whole_bytes - sizes.working_bytes for sizes in gathered),
        faults=tuple(f"moment {at}: {what}" for at, what in faults),
    )


def _account_bytes(
    schedule: Schedule, trace: Trace, residency: Residency, resident_bytes: int
) -> dict[Tier, tuple[int, ...]]:
    """Return the bytes in each tier at every moment."""
    changes: dict[Tier, list[int]] = {tier: [0] * (len(trace) + 1) for tier in Tier}

    def hold(tier: Tier, size_bytes: int, start: int, stop: int) -> None:
        changes[tier][start] += size_bytes
        changes[tier][stop] -= size_bytes

    for tier in Tier:
        hold(tier, residency.bytes_in(tier, trace.chunks), 0, len(trace))
    hold(Tier.ACCELERATOR, resident_bytes, 0, len(trace))
    for at, moment in enumerate(trace.moments):
        hold(Tier.ACCELERATOR, moment.activation_bytes, at, at + 1)
    for gather in schedule.gathers:
        whole_bytes = trace.chunks[gather.chunk].whole_bytes
        hold(Tier.ACCELERATOR, whole_bytes, gather.after_moment, gather.until_moment)
    for stay in schedule.stays:
        size_bytes = trace.chunks[stay.state.chunk].slice_bytes(stay.state.purpose)
        hold(stay.tier, size_bytes, stay.after_moment, stay.until_moment)
    for move in schedule.moves:
        if {move.source, move.target} == {Tier.DISK, Tier.ACCELERATOR}:  # through host memory
            size_bytes = trace.chunks[move.state.chunk].slice_bytes(move.state.purpose)
            stop = max(move.before_moment, move.after_moment + 1)
            hold(Tier.HOST, size_bytes, move.after_moment, stop)
    return {tier: tuple(accumulate(row[:-1])) for tier, row in changes.items()}


class _Inspection:
    """Looks for uses of what is not there; it lives for one call."""

    def __init__(self, schedule: Schedule, trace: Trace, residency: Residency, pace: Pace) -> None:
        """Sort moves and copies by the slice that they are of."""
        self._schedule = schedule
        self._trace = trace
        self._residency = residency
        self._pace = pace
        self._moves: dict[State, list[Move]] = {}
        self._stays: dict[State, list[Stay]] = {}
        for move in schedule.moves:
            self._moves.setdefault(move.state, []).append(move)
        for stay in schedule.stays:
            self._stays.setdefault(stay.state, []).append(stay)

    def faults(self) -> Iterator[tuple[int, str]]:
        """Yield (moment, what is wrong)."""
        yield from self._check_gathers()
        for moments in self._trace.passes():
            match self._trace.moments[moments.start].segment:
                case Segment.UPDATE:
                    for at in moments:
                        yield from self._check_update(at)
                case Segment.BACKWARD:
                    last_uses = {self._trace.moments[at].chunk: at for at in moments}
                    for chunk, at in last_uses.items():
                        state = State(chunk, Purpose.GRADIENT)
                        yield from self._check_written(state, Tier.ACCELERATOR, at)
                case Segment.FORWARD | Segment.EVALUATION:
                    pass

    def _check_gathers(self) -> Iterator[tuple[int, str]]:
        """A chunk that is read is whole, and was gathered from the slice of now."""
        updates = [moment.segment is Segment.UPDATE for moment in self._trace.moments]
        whole: dict[tuple[int, int], int] = {}
        for gather in self._schedule.gathers:
            start, use = gather.after_moment, gather.before_moment
            for at in range(use, gather.until_moment):
                whole[gather.chunk, at] = start
            state = State(gather.chunk, Purpose.WORKING)
            launches = [
                move.after_moment
                for move in self._moves.get(state, [])
                if move.target is Tier.ACCELERATOR and move.before_moment <= use
            ]
            if not self._is_away(state, Tier.ACCELERATOR):
                launches = [start]
            if not any(start <= at and self._is_settled(state, at, use) for at in launches):
                yield start, f"chunk {gather.chunk} is gathered without its slice"
        for at, moment in enumerate(self._trace.moments):
            if updates[at] or not self._trace.chunks[moment.chunk].whole_bytes:
                continue
            begun = whole.get((moment.chunk, at))
            if begun is None:
                yield at, f"chunk {moment.chunk} is read while absent"
            elif any(updates[begun:at]):
                yield at, f"chunk {moment.chunk} is read with values from before an update"

    def _check_update(self, at: int) -> Iterator[tuple[int, str]]:
        """An update finds what it takes, and what it writes goes home."""
        chunk = self._trace.moments[at].chunk
        tier = update_tier(self._residency, chunk, self._pace)
        writes_working = self._trace.chunks[chunk].writes_working
        for purpose in (Purpose.WORKING, *UPDATE_PURPOSES):
            state = State(chunk, purpose)
            is_read = purpose is not Purpose.WORKING or writes_working
            if is_read and not self._is_there(state, tier, at):
                yield at, f"{_name(state)} is not where it is updated"
            if purpose is not Purpose.GRADIENT:
                yield from self._check_written(state, tier, at)

    def _check_written(self, state: State, tier: Tier, at: int) -> Iterator[tuple[int, str]]:
        """What was written away from home goes home, and stays until it is there."""
        if not self._is_away(state, tier):
            return
        homeward = (
            move
            for move in self._moves.get(state, [])
            if (move.source, move.after_moment) == (tier, at)
        )
        if not any(self._stays_in(state, tier, at, move.before_moment) for move in homeward):
            yield at, f"{_name(state)} is written and lost"

    def _is_there(self, state: State, tier: Tier, at: int) -> bool:
        """Return whether the newest value of a slice is in a tier at a moment."""
        if not self._is_away(state, tier):
            return self._is_settled(state, at, at)
        return any(
            move.target is tier
            and move.before_moment <= at
            and self._is_settled(state, move.after_moment, at)
            and self._stays_in(state, tier, move.after_moment, at + 1)
            for move in self._moves.get(state, [])
        )

    def _is_settled(self, state: State, at: int, use: int) -> bool:
        """Return whether all that was written before a use is at home at a moment."""
        home = self._residency.homes[state]
        return all(
            move.before_moment <= at
            for move in self._moves.get(state, [])
            if move.target is home and move.after_moment < use
        )

    def _is_away(self, state: State, tier: Tier) -> bool:
        """Return whether a slice has bytes, and its home is another tier."""
        has_bytes = self._trace.chunks[state.chunk].slice_bytes(state.purpose) > 0
        return has_bytes and self._residency.homes[state] is not tier

    def _stays_in(self, state: State, tier: Tier, start: int, stop: int) -> bool:
        """Return whether one copy has its bytes in a tier at all moments ``[start, stop)``."""
        return any(
            stay.tier is tier and stay.after_moment <= start and stop <= stay.until_moment
            for stay in self._stays.get(state, [])
        )


def _name(state: State) -> str:
    """Return a slice in words."""
    return f"the {state.purpose.name.lower()} slice of chunk {state.chunk}"
