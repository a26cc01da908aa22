"""The user's choice for one engine: its tiers, and the homes that chunks start with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import BudgetError, ConfigurationError, mismatch
from shardwise.options import AdaptiveOffload, Budget, StaticOffload
from shardwise.residency import Limits, divide
from shardwise.residency import Tier as TierName
from shardwise.runtime.adaptation import Adaptation
from shardwise.runtime.agreement import raise_together
from shardwise.runtime.dry import is_dry_run
from shardwise.runtime.homes import Homes, Plan, room_for_two
from shardwise.runtime.limits import agree_on_limits, own_limits
from shardwise.runtime.mover import Mover
from shardwise.runtime.topology import PARAMETER_STAGE
from shardwise.tiers import (
    AcceleratorTier,
    Copier,
    DiskOptions,
    HostTier,
    Tier,
    Tiers,
    WorkerScheduler,
    open_tiers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.homes import ChunkShape
    from shardwise.runtime.topology import Topology


class Offload:
    """Gives chunks slices off the accelerator, by the user's choice."""

    def __init__(self, choice: StaticOffload | AdaptiveOffload, device: torch.device) -> None:
        """Open the tiers."""
        self._choice = choice
        budget = choice.budget if isinstance(choice, AdaptiveOffload) else None
        limits = Limits(disk_bytes=None) if budget is None else own_limits(budget, device)
        folder = choice.disk_path if isinstance(choice, StaticOffload) else choice.budget.disk_path
        disk = None if folder is None else DiskOptions(folder=folder)
        if is_dry_run():
            tiers = _dry_tiers(device)
        else:
            tiers = open_tiers(
                device,
                host_budget_bytes=limits.host_bytes,
                disk_budget_bytes=limits.disk_bytes,
                disk=disk,
            )
        self.mover = Mover(tiers)
        self.adaptation = None if budget is None else Adaptation(self.mover, limits)
        """Changes homes as more is known; None where they are fixed."""

    def choose(self, shapes: Sequence[ChunkShape], topology: Topology) -> Homes:
        """Return the homes of all chunks, equal on all ranks.

        Raises:
            BudgetError: There is no room for them on some rank; nothing was changed on any.

        Collectives: an agreement on limits and one on room.
        """
        if self.adaptation is not None:
            self.adaptation.limits = agree_on_limits(self.adaptation.limits, topology)
        homes, plan, error = None, None, None
        is_anew = any(tier.allocated_bytes for tier in self._limited_tiers())
        try:
            plan = self._plan(shapes)
            homes = Homes(self.mover, plan)
        except BudgetError as refusal:
            error = refusal
            if is_anew and plan is not None:
                error = self._refusal_anew(shapes)
        try:
            raise_together(error, topology)
        except BudgetError:
            if homes is not None:
                homes.close()
            raise
        assert homes is not None
        if self.adaptation is not None:
            self.adaptation.adopt(homes.plan)
        return homes

    def _limited_tiers(self) -> list[Tier]:
        """Return the tiers off the accelerator that have a limit."""
        tiers = (self.mover.tiers.host, self.mover.tiers.disk)
        return [tier for tier in tiers if tier is not None and tier.budget_bytes is not None]

    def _refusal_anew(self, shapes: Sequence[ChunkShape]) -> BudgetError:
        """Return the error for chunks whose earlier slices are still there."""
        tier = self._limited_tiers()[0]
        need_bytes = room_for_two(shapes, tier)
        return BudgetError(
            mismatch(
                f"the {tier.name} tier",
                expected=f"at least {need_bytes} bytes",
                got=f"a limit of {tier.budget_bytes} bytes",
                where="an optimizer that needs whole parameters packs the model anew, and old and "
                "new slices are there for a moment",
                fix=f"raise Budget.{tier.name} to {need_bytes} bytes",
            )
        )

    def _plan(self, shapes: Sequence[ChunkShape]) -> Plan:
        """Return what the choice means for some chunks."""
        if self.adaptation is not None:
            return self.adaptation.first_plan(shapes)
        assert isinstance(self._choice, StaticOffload)
        rests_all = self._choice.optimizer == 1  # also what is frozen today
        away = TierName.HOST if self._choice.to == "host" else TierName.DISK
        return Plan(
            divide([shape.sizes() for shape in shapes], self._choice),
            shapes,
            unused_home=away if rests_all else TierName.ACCELERATOR,
        )

    @property
    def rests_parameters(self) -> bool:
        """Some working slices rest off the accelerator, or may do so."""
        if self.adaptation is not None:
            return self.adaptation.has_limit
        assert isinstance(self._choice, StaticOffload)
        return self._choice.parameters > 0

    def check_room_for_all(
        self, chunks: Sequence[Chunk], topology: Topology, *, is_at_once: bool
    ) -> None:
        """Before a step that brings all state to hand at once: refuse what host memory cannot hold.

        Raises:
            BudgetError: On all ranks, if it does not fit on one; nothing was changed.

        Collectives: an agreement, where state may rest on disk and host memory has a limit.
        """
        limits = Limits() if self.adaptation is None else self.adaptation.limits
        if limits.host_bytes is None or limits.disk_bytes == 0:
            return
        self.mover.settle()
        host, far_bytes = self.mover.tiers.host, sum(chunk.own.far_bytes for chunk in chunks)
        need_bytes = host.allocated_bytes + far_bytes
        error = None
        if is_at_once and far_bytes and need_bytes > limits.host_bytes:
            error = BudgetError(
                mismatch(
                    "the host tier",
                    expected=f"at least {need_bytes} bytes",
                    got=f"a limit of {limits.host_bytes} bytes",
                    where="an optimizer with step hooks, or one that is not torch's own, is "
                    "stepped with all its state at hand",
                    fix=f"raise Budget.host to {need_bytes} bytes",
                )
            )
        raise_together(error, topology)

    def close(self) -> None:
        """Give all memory and the file back; idempotent."""
        self.mover.tiers.close()


def _dry_tiers(device: torch.device) -> Tiers:
    """Return tiers that only count; memory stands for the file."""
    accelerator, copier = AcceleratorTier(device), Copier(WorkerScheduler())
    return Tiers(accelerator, HostTier(), HostTier(), copier=copier)


def check_offload(
    choice: StaticOffload | AdaptiveOffload | None, *, stage: int
) -> StaticOffload | AdaptiveOffload | None:
    """Return a choice, or refuse one that is none or could have no effect.

    Raises:
        ConfigurationError: Of another type, or parameters are to rest where they are always whole.
    """
    if choice is None or isinstance(choice, AdaptiveOffload):
        return choice
    if isinstance(choice, Budget):
        raise ConfigurationError(
            mismatch(
                "offload",
                expected="a shardwise.AdaptiveOffload around it",
                got=repr(choice),
                fix="write AdaptiveOffload(budget)",
            )
        )
    if not isinstance(choice, StaticOffload):
        raise ConfigurationError(
            mismatch(
                "offload",
                expected="a shardwise.StaticOffload, a shardwise.AdaptiveOffload or None",
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
    choice: StaticOffload | AdaptiveOffload | None, device: torch.device
) -> tuple[Offload | None, ConfigurationError | None]:
    """Return the tiers that a choice needs, or why this rank cannot have them."""
    if choice is None:
        return None, None
    try:
        return Offload(choice, device), None
    except ConfigurationError as refusal:
        return None, refusal


def describe(choice: StaticOffload | AdaptiveOffload | None) -> object:
    """Return what ranks must have chosen alike; each may have a disk and limits of its own."""
    match choice:
        case None:
            return None
        case StaticOffload():
            return (choice.parameters, choice.optimizer, choice.to)
        case AdaptiveOffload():
            budget = choice.budget
            return (budget.accelerator is None, budget.disk_path is None)
