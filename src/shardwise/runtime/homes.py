"""The homes of one engine's chunks: what they depend on, and the room that is taken for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.errors import BudgetError
from shardwise.residency import ChunkBytes, Purpose, Residency
from shardwise.residency import Tier as TierName
from shardwise.runtime.state_slices import MASTER, WORKING, StateSlices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.runtime.mover import Mover
    from shardwise.tiers import Tier, Tiers

_ASSUMED_STATE = 2
"""Slices of optimizer state in float32: Adam's. A fraction of bytes depends little on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShape:
    """What the choice depends on, of one chunk."""

    slice_numel: int
    whole_numel: int
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    has_master: bool
    is_trainable: bool
    is_sliced: bool
    """Stage 3: the working slice is a buffer of its own."""
    bundle: int = 0
    """Chunks of one bundle are gathered together."""

    @property
    def whole_bytes(self) -> int:
        """Size of the whole chunk."""
        return self.whole_numel * self.param_dtype.itemsize

    def sizes(
        self, optimizer_bytes: int | None = None, *, tiers: Tiers | None = None
    ) -> ChunkBytes:
        """Return the bytes on one rank; a frozen chunk has no update.

        Args:
            optimizer_bytes: Of the optimizer's state; None assumes Adam's.
            tiers: Where slices may rest, which may be in whole pages; None counts elements.
        """
        itemsize = self.param_dtype.itemsize
        updated = self.slice_numel if self.is_trainable else 0
        if optimizer_bytes is None:
            optimizer_bytes = 4 * updated * _ASSUMED_STATE
        copy_bytes = 0 if self.has_master or self.is_sliced else updated * itemsize
        state_bytes = max(1, self.slice_numel * (4 if self.has_master else itemsize))
        num_slices = -(-optimizer_bytes // state_bytes)
        return ChunkBytes(
            whole_bytes=self.whole_bytes if self.is_sliced else 0,
            working_bytes=self.slice_numel * itemsize if self.is_sliced else 0,
            master_bytes=4 * updated if self.has_master else 0,
            optimizer_bytes=optimizer_bytes,
            gradient_bytes=updated * self.reduce_dtype.itemsize,
            copy_bytes=copy_bytes,
            num_update_slices=num_slices + (bool(updated) and (self.has_master or copy_bytes > 0)),
            host_padding_bytes=self._padding_bytes(None if tiers is None else tiers.host),
            disk_padding_bytes=self._padding_bytes(None if tiers is None else tiers.disk),
        )

    def _padding_bytes(self, tier: Tier | None) -> int:
        """Return the most that a tier adds to one slice."""
        if tier is None:
            return 0
        dtypes = (torch.float32, self.param_dtype, self.reduce_dtype)
        return max(
            tier.footprint_bytes(self.slice_numel, dtype) - self.slice_numel * dtype.itemsize
            for dtype in dtypes
        )


class Plan:
    """Which tier each slice of some chunks has its home in."""

    def __init__(
        self,
        residency: Residency,
        shapes: Sequence[ChunkShape],
        *,
        unused_home: TierName = TierName.ACCELERATOR,
        moves: bool = False,
    ) -> None:
        """Read homes off a residency.

        Args:
            residency: Homes by chunk and purpose.
            shapes: Of all chunks.
            unused_home: Of the state of chunks that are frozen today.
            moves: Homes may change, so that slices on the accelerator have one too.
        """
        self.shapes = shapes
        self.moves = moves
        self.residency = residency
        self._unused_home = unused_home

    def working(self, index: int) -> TierName:
        """Return where a working slice rests; one that is always whole is on the accelerator."""
        if not self.shapes[index].is_sliced:
            return TierName.ACCELERATOR
        return self.residency.home(index, Purpose.WORKING)

    def state(self, index: int) -> TierName:
        """Return where masters and optimizer state rest.

        A frozen chunk has none of these yet; it follows the rest. Where the working slice itself is
        updated, its state lies with it.
        """
        shape = self.shapes[index]
        home = self.residency.update_home(index)
        if not shape.is_trainable:
            home = self._unused_home
        if home is TierName.ACCELERATOR and shape.is_sliced and not shape.has_master:
            return self.working(index)
        return home

    def is_together(self, index: int) -> bool:
        """Return whether state and working slice, or whole parameters, rest in one tier."""
        return self.working(index) is self.state(index)


def room_for_two(shapes: Sequence[ChunkShape], tier: Tier) -> int:
    """Return what a tier must hold while chunks are packed anew: all slices, old ones and new."""
    total_bytes = 0
    for shape in shapes:
        dtypes = [shape.param_dtype] if shape.is_sliced else []
        if shape.is_trainable:
            dtypes.append(torch.float32 if shape.has_master else shape.param_dtype)
        total_bytes += sum(tier.footprint_bytes(shape.slice_numel, dtype) for dtype in dtypes)
    return 2 * total_bytes


class Homes:
    """Room in the tiers for the slices of chunks: masters and working slices at once."""

    def __init__(self, mover: Mover, plan: Plan) -> None:
        """Take room.

        Raises:
            BudgetError: It is not there; nothing was changed.
        """
        self.plan = plan
        self._mover = mover
        self._states: list[StateSlices | None] = []
        self._working: list[StateSlices | None] = []
        try:
            for index, shape in enumerate(plan.shapes):
                self._add(index, shape)
        except BudgetError:
            self.close()
            raise

    def _add(self, index: int, shape: ChunkShape) -> None:
        """Take room for one chunk."""
        working = None
        if shape.is_sliced:
            working = self._slices(self.plan.working(index), shape)
        self._working.append(working)
        if working is not None:
            working.add(WORKING, shape.param_dtype)
        state = self._slices(self.plan.state(index), shape)
        self._states.append(state)
        is_updated_apart = shape.has_master or not self.plan.is_together(index)
        if state is not None and shape.is_trainable and is_updated_apart:
            state.add(MASTER, torch.float32 if shape.has_master else shape.param_dtype)

    def close(self) -> None:
        """Give the room back."""
        for slices in (*self._states, *self._working):
            if slices is not None:
                slices.close()

    def state_of(self, index: int) -> StateSlices | None:
        """Return the home of a chunk's master and optimizer state; None: where forward runs."""
        return self._states[index]

    def working_of(self, index: int) -> StateSlices | None:
        """Return the home of a chunk's working slice; None: where forward runs."""
        return self._working[index]

    def _slices(self, name: TierName, shape: ChunkShape) -> StateSlices | None:
        """Return an empty home in a tier, None for the accelerator of what never moves."""
        if name is TierName.ACCELERATOR and not self.plan.moves:
            return None
        return StateSlices(self._mover, self._mover.tier(name), shape.slice_numel)
