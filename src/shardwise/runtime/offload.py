"""The choice of homes for one engine's chunks, and the tiers that they lie in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.errors import BudgetError, ConfigurationError, ShardwiseError, mismatch
from shardwise.options import StaticOffload
from shardwise.residency import ChunkBytes, Purpose, Residency, divide
from shardwise.residency import Tier as TierName
from shardwise.runtime.agreement import is_true_anywhere
from shardwise.runtime.dry import is_dry_run
from shardwise.runtime.mover import Mover
from shardwise.runtime.state_slices import MASTER, WORKING, StateSlices
from shardwise.runtime.topology import PARAMETER_STAGE
from shardwise.tiers import (
    AcceleratorTier,
    Copier,
    DiskOptions,
    HostTier,
    Tiers,
    WorkerScheduler,
    open_tiers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.runtime.topology import Topology

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

    def sizes(self) -> ChunkBytes:
        """Return the bytes on one rank; a frozen chunk has no update."""
        itemsize = self.param_dtype.itemsize
        updated = self.slice_numel if self.is_trainable else 0
        return ChunkBytes(
            whole_bytes=self.whole_numel * itemsize if self.is_sliced else 0,
            working_bytes=self.slice_numel * itemsize if self.is_sliced else 0,
            master_bytes=4 * updated if self.has_master else 0,
            optimizer_bytes=4 * updated * _ASSUMED_STATE,
            gradient_bytes=updated * self.reduce_dtype.itemsize,
        )


class Offload:
    """Gives chunks slices off the accelerator, by the user's choice."""

    def __init__(self, choice: StaticOffload, device: torch.device) -> None:
        """Open the tiers."""
        self._choice = choice
        folder = choice.disk_path
        disk = None if folder is None else DiskOptions(folder=folder)
        tiers = _dry_tiers(device) if is_dry_run() else open_tiers(device, disk=disk)
        self.mover = Mover(tiers)

    def choose(self, shapes: Sequence[ChunkShape], topology: Topology) -> Homes:
        """Return the homes of all chunks, equal on all ranks.

        Raises:
            BudgetError: There is no room for them on some rank; nothing was changed on any.

        Collectives: one agreement.
        """
        homes, error = None, None
        try:
            homes = Homes(self, divide([shape.sizes() for shape in shapes], self._choice), shapes)
        except BudgetError as refusal:
            error = refusal
        try:
            raise_together(error, topology)
        except BudgetError:
            if homes is not None:
                homes.close()
            raise
        assert homes is not None
        return homes

    @property
    def rests_all(self) -> bool:
        """All state rests off the accelerator, also that of chunks which are frozen today."""
        return self._choice.optimizer == 1

    @property
    def rests_parameters(self) -> bool:
        """Some working slices rest off the accelerator."""
        return self._choice.parameters > 0

    def close(self) -> None:
        """Give all memory and the file back; idempotent."""
        self.mover.tiers.close()


def _dry_tiers(device: torch.device) -> Tiers:
    """Return tiers that only count; memory stands for the file."""
    accelerator, copier = AcceleratorTier(device), Copier(WorkerScheduler())
    return Tiers(accelerator, HostTier(), HostTier(), copier=copier)


class Homes:
    """Where the slices of each chunk rest; room for masters and working slices is taken at once."""

    def __init__(
        self, offload: Offload, residency: Residency, shapes: Sequence[ChunkShape]
    ) -> None:
        """Take room.

        Raises:
            BudgetError: It is not there; nothing was changed.
        """
        self._offload, self._residency = offload, residency
        self._states: list[StateSlices | None] = []
        self._working: list[StateSlices | None] = []
        try:
            for index, shape in enumerate(shapes):
                self._add(index, shape)
        except BudgetError:
            self.close()
            raise

    def _add(self, index: int, shape: ChunkShape) -> None:
        """Take room for one chunk."""
        working = self._slices(self._working_home(index), shape)
        self._working.append(working)
        if working is not None:
            working.add(WORKING, shape.param_dtype)
        state = self._slices(self._state_home(index, shape), shape)
        self._states.append(state)
        is_updated_apart = shape.has_master or not self.is_together(index, shape)
        if state is not None and shape.is_trainable and is_updated_apart:
            state.add(MASTER, torch.float32 if shape.has_master else shape.param_dtype)

    def close(self) -> None:
        """Give the room back."""
        for slices in (*self._states, *self._working):
            if slices is not None:
                slices.close()

    def state_of(self, index: int) -> StateSlices | None:
        """Return the home of a chunk's master and optimizer state, None on the accelerator."""
        return self._states[index]

    def working_of(self, index: int) -> StateSlices | None:
        """Return the home of a chunk's working slice, None on the accelerator."""
        return self._working[index]

    def is_together(self, index: int, shape: ChunkShape) -> bool:
        """Return whether state and working slice rest in one tier."""
        return shape.is_sliced and self._working_home(index) is self._state_home(index, shape)

    def _working_home(self, index: int) -> TierName:
        """Return where a working slice rests."""
        return self._residency.home(index, Purpose.WORKING)

    def _state_home(self, index: int, shape: ChunkShape) -> TierName:
        """Return where masters and optimizer state rest.

        A frozen chunk has none of these yet; it follows the rest. Where the working slice itself is
        updated, its state lies with it.
        """
        home, tiers = self._residency.update_home(index), self._offload.mover.tiers
        if not shape.is_trainable and self._offload.rests_all:
            home = TierName.HOST if tiers.disk is None else TierName.DISK
        if home is TierName.ACCELERATOR and shape.is_sliced and not shape.has_master:
            return self._working_home(index)
        return home

    def _slices(self, name: TierName, shape: ChunkShape) -> StateSlices | None:
        """Return an empty home in a tier, None for the accelerator."""
        mover = self._offload.mover
        match name:
            case TierName.HOST:
                return StateSlices(mover, mover.tiers.host, shape.slice_numel)
            case TierName.DISK:
                assert mover.tiers.disk is not None
                return StateSlices(mover, mover.tiers.disk, shape.slice_numel)
            case TierName.ACCELERATOR:
                return None


def raise_together(error: ShardwiseError | None, topology: Topology) -> None:
    """Raise on every rank if one has an error. Collectives: one all-reduce of a number per axis."""
    if not is_true_anywhere(error is not None, topology):
        return
    raise error or BudgetError(
        mismatch(
            "offload",
            expected="room on every rank",
            got="a rank without, which has said why",
            fix="see the error of that rank",
        )
    )


def check_offload(choice: StaticOffload | None, *, stage: int) -> StaticOffload | None:
    """Return a choice, or refuse one that is none or could have no effect.

    Raises:
        ConfigurationError: Of another type, or parameters are to rest where they are always whole.
    """
    if choice is None:
        return None
    if not isinstance(choice, StaticOffload):
        raise ConfigurationError(
            mismatch(
                "offload",
                expected="a shardwise.StaticOffload or None",
                got=repr(choice),
                fix="write StaticOffload(optimizer=1.0)",
            )
        )
    if choice.parameters and stage != PARAMETER_STAGE:
        raise ConfigurationError(
            mismatch(
                "StaticOffload.parameters",
                expected=f"0 at stage {stage}, where parameters are always whole",
                got=choice.parameters,
                fix="shard at stage 3, or offload optimizer= alone",
            )
        )
    return choice


def open_offload(
    choice: StaticOffload | None, device: torch.device
) -> tuple[Offload | None, ConfigurationError | None]:
    """Return the tiers that a choice needs, or why this rank cannot have them."""
    if choice is None:
        return None, None
    try:
        return Offload(choice, device), None
    except ConfigurationError as refusal:
        return None, refusal


def describe(choice: StaticOffload | None) -> object:
    """Return what ranks must have chosen alike; each may have a disk of its own."""
    return None if choice is None else (choice.parameters, choice.optimizer, choice.to)
