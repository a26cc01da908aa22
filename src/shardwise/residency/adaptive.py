"""Keep on the accelerator what fits beside the rest of training; then host memory, then disk.

Slices are laid in one row, the most valuable bytes first, and the row is cut twice::

    | working slices ...          | updates ...                   |
    | accelerator                      | host       | disk        |

Working slices come first: each is read by every gather of its chunk, twice or more in a step, and
training waits for it; what an update takes moves once, while other chunks are updated, or not at
all where the host updates it. A chunk without masters is updated in its working slice: the two are
one part of the row, among the updates. Equal parts come in order of use, since the first moves of a
step have nothing to hide behind. Cuts of one row make more room always mean fewer bytes moved,
which filling gaps with whatever fits would not.

All ranks must decide alike: limits are the least, and needs the most, over the ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import BudgetError, ConfigurationError, mismatch
from shardwise.residency.staging import bound_staging
from shardwise.residency.state import Residency, Tier, reside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.residency.staging import Pace, Staging
    from shardwise.residency.state import ChunkBytes, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the accelerator holds besides slices and their copies."""

    resident_bytes: int = 0
    """Parameters and buffers that are always there, communication buffers, the device's own."""
    gather_bytes: int = 0
    """Limit of the cache of gathered chunks."""
    activation_bytes: int | None = None
    """Measured peak of everything else; None: not measured yet. Until it is, as little as the
    other tiers allow stays on the accelerator, and activations count as nothing."""
    update_share: float = 1.0
    """Fraction of the room beside all working slices that updates may take on the accelerator."""

    def __post_init__(self) -> None:
        """Refuse what is no size and no fraction."""
        sizes = (self.resident_bytes, self.gather_bytes, self.activation_bytes or 0)
        if min(sizes) < 0 or not 0 <= self.update_share <= 1:
            raise ConfigurationError(
                mismatch(
                    "Needs",
                    expected="sizes from 0 and a fraction between 0 and 1",
                    got=self,
                    fix="change that field",
                )
            )

    @property
    def total_bytes(self) -> int:
        """Sum of what is known."""
        return self.resident_bytes + self.gather_bytes + (self.activation_bytes or 0)


class _Part(NamedTuple):
    """One part of the row."""

    chunk: int
    size_bytes: int
    """On the accelerator."""
    is_update: bool
    copy_bytes: int = 0
    """Taken in addition elsewhere."""
    gradient_bytes: int = 0
    """The part that lies in host memory where the others lie on disk."""
    host_padding_bytes: int = 0
    """What pages add in host memory, without gradients."""
    gradient_padding_bytes: int = 0
    """What they add to gradients."""
    disk_padding_bytes: int = 0
    """What sectors add on disk."""


class _Cuts(NamedTuple):
    """Where the row is cut."""

    num_kept: int
    """Parts on the accelerator."""
    num_near: int
    """Parts on the accelerator or in host memory."""
    accelerator_bytes: int
    """What slices and copies take on the accelerator."""


def adapt(chunks: Sequence[ChunkBytes], *, limits: Limits, needs: Needs, pace: Pace) -> Residency:
    """Return the residency that keeps as much on the accelerator as its limit allows.

    Raises:
        BudgetError: No residency fits; it names the cheapest limit to raise, and to what.
    """
    row = _Row(chunks, pace)
    if limits.accelerator_bytes is None:
        return row.residency(row.cut(len(row.parts), limits))
    room_bytes = limits.accelerator_bytes - needs.total_bytes
    modest = row.smallest(limits)
    if modest.accelerator_bytes > room_bytes:
        raise _no_room(row, limits, needs)
    if needs.activation_bytes is None:
        return row.residency(modest)
    updates_bytes = needs.update_share * max(0, room_bytes - row.working_bytes)
    fitting = (
        cuts
        for cuts in row.possible(limits)
        if cuts.accelerator_bytes <= room_bytes and row.kept_updates_bytes(cuts) <= updates_bytes
    )
    return row.residency(max([modest, *fitting], key=lambda cuts: cuts.num_kept))


def smallest_budget(
    chunks: Sequence[ChunkBytes], *, limits: Limits, needs: Needs, pace: Pace
) -> int:
    """Return the least ``accelerator_bytes`` with which ``adapt`` finds a residency.

    Args:
        chunks: Sizes by index.
        limits: Those of host and disk count.
        needs: What else the accelerator holds.
        pace: How moves overlap with uses; depth 0 needs the least.
    """
    return needs.total_bytes + _Row(chunks, pace).smallest(limits).accelerator_bytes


def spare_bytes(
    chunks: Sequence[ChunkBytes], residency: Residency, *, limits: Limits, needs: Needs, pace: Pace
) -> int | None:
    """Return what a residency leaves of the accelerator's limit; None where there is none.

    The cache of gathered chunks may grow by as much, so that chunks stay from forward to backward.
    """
    if limits.accelerator_bytes is None:
        return None
    has_updates_away = any(
        chunk.update_bytes and residency.update_home(index) is not Tier.ACCELERATOR
        for index, chunk in enumerate(chunks)
    )
    staging = bound_staging(chunks, pace, has_updates_away=has_updates_away, uses_disk=False)
    held_bytes = residency.bytes_in(Tier.ACCELERATOR, chunks) + staging.accelerator_bytes
    return limits.accelerator_bytes - needs.total_bytes - held_bytes


class _Row:
    """All slices in order of value, and what cutting the row there means; it lives for one call."""

    def __init__(self, chunks: Sequence[ChunkBytes], pace: Pace) -> None:
        """Lay out the slices."""
        with_master = [not chunk.writes_working for chunk in chunks]
        working = [
            _Part(
                index,
                chunk.working_bytes,
                is_update=False,
                host_padding_bytes=chunk.host_padding_bytes,
                disk_padding_bytes=chunk.disk_padding_bytes,
            )
            for index, chunk in enumerate(chunks)
            if chunk.working_bytes and (with_master[index] or not chunk.update_bytes)
        ]
        updates = [
            _Part(
                index,
                chunk.update_bytes + (0 if with_master[index] else chunk.working_bytes),
                is_update=True,
                copy_bytes=chunk.copy_bytes,
                gradient_bytes=chunk.gradient_bytes,
                host_padding_bytes=_num_slices(chunk) * chunk.host_padding_bytes,
                gradient_padding_bytes=chunk.host_padding_bytes,
                disk_padding_bytes=_num_slices(chunk) * chunk.disk_padding_bytes,
            )
            for index, chunk in enumerate(chunks)
            if chunk.update_bytes
        ]
        self.parts = [*working, *updates]
        self._chunks = chunks
        self._ends = [0, *accumulate(part.size_bytes for part in self.parts)]
        sizes = [(part, part.size_bytes + part.copy_bytes) for part in self.parts]
        gradients = [(part, part.gradient_bytes) for part in self.parts]
        self._host_ends = [
            0,
            *accumulate(s + p.host_padding_bytes + p.gradient_padding_bytes for p, s in sizes),
        ]
        self._disk_ends = [
            0,
            *accumulate(s - p.gradient_bytes + p.disk_padding_bytes for p, s in sizes),
        ]
        self._gradient_ends = [0, *accumulate(g + p.gradient_padding_bytes for p, g in gradients)]
        self.working_bytes = self._ends[len(working)]
        self._staging = {
            (has_updates_away, uses_disk): bound_staging(
                chunks, pace, has_updates_away=has_updates_away, uses_disk=uses_disk
            )
            for has_updates_away in (False, True)
            for uses_disk in (False, True)
        }

    def kept_updates_bytes(self, cuts: _Cuts) -> int:
        """Return what updates take on the accelerator."""
        return max(0, self._ends[cuts.num_kept] - self.working_bytes)

    def staging(self, num_kept: int, *, uses_disk: bool = False) -> Staging:
        """Return the bytes of copies."""
        has_updates_away = num_kept < len(self.parts) and self.parts[-1].is_update
        return self._staging[has_updates_away, uses_disk]

    def accelerator_bytes(self, num_kept: int) -> int:
        """Return what keeping the first parts takes there."""
        return self._ends[num_kept] + self.staging(num_kept).accelerator_bytes

    def host_bytes(self, num_kept: int, num_near: int) -> int:
        """Return what lies in host memory between the cuts, and of what lies on disk."""
        near, gradients = self._host_ends, self._gradient_ends
        return near[num_near] - near[num_kept] + gradients[-1] - gradients[num_near]

    def disk_bytes(self, num_near: int) -> int:
        """Return what lies on disk if all parts from one on have their home there."""
        return self._disk_ends[-1] - self._disk_ends[num_near]

    def num_near(self, num_kept: int, host_bytes: float) -> int | None:
        """Return how many parts come before the disk if there is one; None: copies do not fit."""
        room_bytes = host_bytes - self.staging(num_kept, uses_disk=True).host_bytes
        fitting = bisect_right(
            range(num_kept, len(self.parts) + 1),
            room_bytes,
            key=lambda num_near: self.host_bytes(num_kept, num_near),
        )
        return num_kept + fitting - 1 if fitting else None

    def cut(self, num_kept: int, limits: Limits) -> _Cuts | None:
        """Return the cuts that keep the first parts; None if the others fit nowhere."""
        host_bytes, disk_bytes = _number(limits.host_bytes), _number(limits.disk_bytes)
        all_parts = len(self.parts)
        size_bytes = self.accelerator_bytes(num_kept)
        near_bytes = self.host_bytes(num_kept, all_parts)
        if near_bytes + self.staging(num_kept).host_bytes <= host_bytes:
            return _Cuts(num_kept, all_parts, size_bytes)
        num_near = self.num_near(num_kept, host_bytes)
        if num_near is None or self.disk_bytes(num_near) > disk_bytes:
            return None
        return _Cuts(num_kept, num_near, size_bytes)

    def possible(self, limits: Limits) -> list[_Cuts]:
        """Return all cuts whose rest fits on host and disk; keeping everything always does."""
        cuts = (self.cut(num_kept, limits) for num_kept in range(len(self.parts) + 1))
        return [found for found in cuts if found is not None]

    def smallest(self, limits: Limits) -> _Cuts:
        """Return the cuts that take the least on the accelerator."""
        return min(self.possible(limits), key=lambda cuts: (cuts.accelerator_bytes, cuts.num_kept))

    def residency(self, cuts: _Cuts | None) -> Residency:
        """Return the homes that cuts mean."""
        assert cuts is not None, "keeping everything fits on no other tier"
        working = [Tier.ACCELERATOR] * len(self._chunks)
        update = [Tier.ACCELERATOR] * len(self._chunks)
        for position, part in enumerate(self.parts):
            if position < cuts.num_kept:
                continue
            home = Tier.HOST if position < cuts.num_near else Tier.DISK
            chunk = self._chunks[part.chunk]
            if not part.is_update or (chunk.writes_working and chunk.working_bytes):
                working[part.chunk] = home
            if part.is_update:
                update[part.chunk] = home
        return reside(working, update)


def _no_room(row: _Row, limits: Limits, needs: Needs) -> BudgetError:
    """Return the error that names the cheapest limit to raise: disk, host or accelerator."""
    assert limits.accelerator_bytes is not None
    least_bytes = needs.total_bytes + row.smallest(limits).accelerator_bytes
    raised = _raise_elsewhere(row, limits, limits.accelerator_bytes - needs.total_bytes)
    tier, need_bytes = raised or (Tier.ACCELERATOR, least_bytes)
    fix = f"raise Budget.{tier.value} to {need_bytes} bytes"
    if tier is not Tier.ACCELERATOR:
        fix += f", or Budget.accelerator to {least_bytes} bytes"
    return BudgetError(
        mismatch(
            f"the {tier.value} tier",
            expected=f"at least {need_bytes} bytes",
            got=f"a limit of {limits.of(tier)} bytes",
            where=f"{needs.total_bytes} bytes of the accelerator's {limits.accelerator_bytes} are "
            "needed beside slices",
            fix=fix,
        )
    )


def _raise_elsewhere(row: _Row, limits: Limits, room_bytes: int) -> tuple[Tier, int] | None:
    """Return which limit besides the accelerator's to raise, and to what; None if none helps."""
    kept = [k for k in range(len(row.parts) + 1) if row.accelerator_bytes(k) <= room_bytes]
    if not kept:
        return None
    num_kept = kept[-1]
    all_parts = len(row.parts)
    enough_bytes = row.host_bytes(num_kept, all_parts) + row.staging(num_kept).host_bytes
    if limits.disk_bytes != 0:
        num_near = row.num_near(num_kept, _number(limits.host_bytes))
        if num_near is not None:
            return Tier.DISK, row.disk_bytes(num_near)
        # with a disk, host memory for copies and gradients does
        copies = row.staging(num_kept, uses_disk=True).host_bytes
        if row.disk_bytes(num_kept) <= _number(limits.disk_bytes):
            enough_bytes = min(enough_bytes, row.host_bytes(num_kept, num_kept) + copies)
    return Tier.HOST, enough_bytes


def _num_slices(chunk: ChunkBytes) -> int:
    """Return the slices that an update takes, without gradients."""
    return chunk.num_update_slices + (chunk.writes_working and chunk.working_bytes > 0)


def _number(limit_bytes: int | None) -> float:
    """Return a limit that compares with numbers."""
    return math.inf if limit_bytes is None else limit_bytes
