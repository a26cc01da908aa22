"""All moves of one step, foretold: what is copied from where to where, between which moments.

The home of a slice keeps its bytes while a copy is elsewhere. A copy away from home is a *stay*.

==================  ================================================================================
a gather            brings the rank's slice from its home straight into the gathered buffer
backward            leaves a gradient slice on the accelerator, which is written to its home
an update           fetches what does not lie where it runs, ``Pace.depth`` chunks ahead, and writes
                    back masters, optimizer state and working slices behind it
==================  ================================================================================

Nothing here moves bytes, and nothing checks budgets: see ``simulator``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.residency.gathers import Gather, foretell_gathers
from shardwise.residency.state import UPDATE_PURPOSES, Purpose, State, Tier
from shardwise.residency.trace import Segment

if TYPE_CHECKING:
    from shardwise.residency.staging import Pace
    from shardwise.residency.state import Residency
    from shardwise.residency.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One copy of a slice from tier to tier."""

    state: State
    source: Tier
    target: Tier
    after_moment: int
    """A move from home is launched as this moment begins; one to its home, behind the use at this
    moment."""
    before_moment: int
    """It is waited for as this moment begins; the number of moments at the end of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A copy of a slice away from its home; its bytes are taken in ``[after, until)``."""

    state: State
    tier: Tier
    after_moment: int
    until_moment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What moves in one step."""

    gathers: tuple[Gather, ...]
    moves: tuple[Move, ...]
    """In order of their launch; at one moment, moves to home come after the others."""
    stays: tuple[Stay, ...]


def make_schedule(trace: Trace, *, residency: Residency, pace: Pace) -> Schedule:
    """Return the moves of a step.

    Args:
        trace: One step: forward and backward passes, at most one update of a chunk in a run of
            updates.
        residency: Where slices lie between uses.
        pace: How far moves run ahead of uses and behind.
    """
    limit_bytes = math.inf if pace.gather_bytes is None else pace.gather_bytes
    gathers = foretell_gathers(trace, limit_bytes=limit_bytes, prefetch_bytes=pace.prefetch_bytes)
    plan = _Plan(trace, residency, pace)
    for gather in gathers:
        plan.bring_slice(gather)
    for moments in trace.passes():
        match trace.moments[moments.start].segment:
            case Segment.BACKWARD:
                plan.put_gradients(moments)
            case Segment.UPDATE:
                plan.update(moments)
            case Segment.FORWARD | Segment.EVALUATION:
                pass
    moves = sorted(plan.moves, key=lambda move: (move.after_moment, plan.is_homeward(move)))
    return Schedule(gathers=gathers, moves=tuple(moves), stays=tuple(plan.stays))


def update_tier(residency: Residency, chunk: int, pace: Pace) -> Tier:
    """Return where a chunk is updated: at home on the accelerator, else where the pace says."""
    home = residency.update_home(chunk)
    return home if home is Tier.ACCELERATOR else pace.update_tier


class _Plan:
    """A schedule in the making; it lives for one call."""

    def __init__(self, trace: Trace, residency: Residency, pace: Pace) -> None:
        """Plan nothing yet."""
        self.moves: list[Move] = []
        self.stays: list[Stay] = []
        self._trace = trace
        self._residency = residency
        self._pace = pace
        self._home_at: dict[int, int] = {}
        """Chunk -> moment at which its last gradient is at home."""

    def is_homeward(self, move: Move) -> bool:
        """Return whether a move ends at home."""
        return move.target is self._residency.homes[move.state]

    def bring_slice(self, gather: Gather) -> None:
        """Copy the rank's slice into a gathered buffer; it takes no bytes of its own."""
        state = State(gather.chunk, Purpose.WORKING)
        home = self._residency.homes[state]
        if home is not Tier.ACCELERATOR and self._size(state):
            self._move(state, home, Tier.ACCELERATOR, gather.after_moment, gather.before_moment)

    def put_gradients(self, moments: range) -> None:
        """Write each gradient slice home after the last use of its chunk in a backward pass."""
        last_uses = {self._trace.moments[at].chunk: at for at in moments}
        for chunk, at in last_uses.items():
            state = State(chunk, Purpose.GRADIENT)
            home = self._residency.homes[state]
            if home is Tier.ACCELERATOR or not self._size(state):
                continue
            next_use = self._trace.next_use(chunk, at=at)
            behind = min(self._pace.depth + 1, math.inf if next_use is None else next_use)
            arrival = min(at + int(behind), len(self._trace))
            self._home_at[chunk] = arrival
            self._stay(state, Tier.ACCELERATOR, at, arrival)
            self._move(state, Tier.ACCELERATOR, home, at, arrival)

    def update(self, moments: range) -> None:
        """Bring what each update takes to where it runs, and the results home."""
        for at in moments:
            chunk = self._trace.moments[at].chunk
            sizes = self._trace.chunks[chunk]
            tier = update_tier(self._residency, chunk, self._pace)
            soonest = max(at - self._pace.depth, moments.start)
            latest = min(at + 1 + self._pace.depth, moments.stop)
            for purpose in (Purpose.WORKING, *UPDATE_PURPOSES):
                state = State(chunk, purpose)
                home = self._residency.homes[state]
                if home is tier or not self._size(state):
                    continue
                is_read = purpose is not Purpose.WORKING or sizes.writes_working
                is_written = purpose is not Purpose.GRADIENT
                start = at
                if is_read:
                    is_late = purpose is Purpose.GRADIENT and chunk in self._home_at
                    start = max(soonest, self._home_at[chunk]) if is_late else soonest
                    self._move(state, home, tier, start, at)
                if is_written:
                    self._move(state, tier, home, at, latest)
                self._stay(state, tier, start, latest if is_written else at + 1)

    def _size(self, state: State) -> int:
        """Return the bytes of a slice."""
        return self._trace.chunks[state.chunk].slice_bytes(state.purpose)

    def _move(self, state: State, source: Tier, target: Tier, after: int, before: int) -> None:
        """Add a move."""
        self.moves.append(
            Move(
                state=state, source=source, target=target, after_moment=after, before_moment=before
            )
        )

    def _stay(self, state: State, tier: Tier, after: int, until: int) -> None:
        """Add a copy away from home."""
        self.stays.append(Stay(state=state, tier=tier, after_moment=after, until_moment=until))
