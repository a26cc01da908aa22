"""What one rank holds of each chunk, and the tiers in which it can lie; it decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import ConfigurationError, mismatch
from shardwise.options import resolve_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardwise.options import Budget


class Tier(Enum):
    """Where bytes can lie; copies run between any two."""

    ACCELERATOR = "accelerator"
    HOST = "host"
    DISK = "disk"


class Purpose(Enum):
    """What a slice of a chunk is for."""

    WORKING = "working parameters: read by every gather of the chunk"
    MASTER = "float32 copy of 16-bit working parameters: read and written by an update"
    OPTIMIZER = "state of the optimizer, all tensors together: read and written by an update"
    GRADIENT = "reduced gradients: written by backward, read by an update, then gone"


UPDATE_PURPOSES = (Purpose.MASTER, Purpose.OPTIMIZER, Purpose.GRADIENT)
"""What an update takes besides the working slice. It lies in one tier for each chunk, since an
update needs all of it at the same time; gradients of what lies on disk lie in host memory."""


class State(NamedTuple):
    """One slice: the unit that is moved."""

    chunk: int
    """Index of the chunk in its engine."""
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBytes:
    """Sizes of one chunk on one rank; equal on all ranks, since slices are equally long."""

    whole_bytes: int = 0
    """The gathered chunk; 0 where the parameters are always whole (stages 0 to 2)."""
    working_bytes: int = 0
    """Slice of the working parameters; 0 where they are always whole."""
    master_bytes: int = 0
    """Slice of the masters; 0 where an update writes the working parameters themselves."""
    optimizer_bytes: int = 0
    """Slices of all tensors of the optimizer's state."""
    gradient_bytes: int = 0
    """Slice of the reduced gradients; 0 for a frozen chunk."""
    copy_bytes: int = 0
    """What an update off the accelerator takes in addition: a copy of working parameters that are
    whole on the accelerator and have no master."""
    num_update_slices: int = 0
    """Slices of masters, copies and optimizer state."""
    host_padding_bytes: int = 0
    """What whole pages add to each slice in host memory, at most."""
    disk_padding_bytes: int = 0
    """What whole sectors add to each slice on disk, at most."""

    def __post_init__(self) -> None:
        """Refuse negative sizes."""
        sizes = (
            self.whole_bytes,
            self.copy_bytes,
            *(self.slice_bytes(purpose) for purpose in Purpose),
        )
        if min(sizes) < 0:
            raise ConfigurationError(
                mismatch(
                    "ChunkBytes", expected="sizes from 0", got=self, fix="pass the chunk's sizes"
                )
            )

    def slice_bytes(self, purpose: Purpose) -> int:
        """Return the size of the slice of one purpose."""
        match purpose:
            case Purpose.WORKING:
                return self.working_bytes
            case Purpose.MASTER:
                return self.master_bytes
            case Purpose.OPTIMIZER:
                return self.optimizer_bytes
            case Purpose.GRADIENT:
                return self.gradient_bytes

    @property
    def update_bytes(self) -> int:
        """What an update takes besides the working slice."""
        return self.master_bytes + self.optimizer_bytes + self.gradient_bytes

    @property
    def writes_working(self) -> bool:
        """True where an update reads and writes the working slice: there is no master."""
        return self.master_bytes == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes that each tier may hold; None is no limit.

    All ranks must decide alike, so these are the least over the ranks, agreed on beforehand.
    """

    accelerator_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = 0
    """0 is no disk tier."""

    def of(self, tier: Tier) -> int | None:
        """Return the limit of one tier."""
        match tier:
            case Tier.ACCELERATOR:
                return self.accelerator_bytes
            case Tier.HOST:
                return self.host_bytes
            case Tier.DISK:
                return self.disk_bytes


def resolve_limits(
    budget: Budget,
    *,
    accelerator_bytes: int | None = None,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> Limits:
    """Return the limits that a budget sets on devices of the given capacities.

    Args:
        budget: What the user chose.
        accelerator_bytes: Capacity of the accelerator; None where it is not known.
        host_bytes: Capacity of host memory, for this rank.
        disk_bytes: Free bytes on the disk, for this rank.

    Raises:
        ConfigurationError: A share of a capacity that is not known.
    """
    has_disk = budget.disk_path is not None
    return Limits(
        accelerator_bytes=resolve_bytes(
            budget.accelerator, capacity_bytes=accelerator_bytes, what="Budget.accelerator"
        ),
        host_bytes=resolve_bytes(budget.host, capacity_bytes=host_bytes, what="Budget.host"),
        disk_bytes=resolve_bytes(budget.disk, capacity_bytes=disk_bytes, what="Budget.disk")
        if has_disk
        else 0,
    )


@dataclass(frozen=True, slots=True)
class Residency:
    """The home of every slice: the tier in which it lies between uses."""

    homes: Mapping[State, Tier]

    def __post_init__(self) -> None:
        """Make the mapping read-only."""
        object.__setattr__(self, "homes", MappingProxyType(dict(self.homes)))

    def home(self, chunk: int, purpose: Purpose) -> Tier:
        """Return where one slice lies."""
        return self.homes[State(chunk, purpose)]

    def update_home(self, chunk: int) -> Tier:
        """Return where what an update takes lies."""
        return self.homes[State(chunk, Purpose.OPTIMIZER)]

    def bytes_in(self, tier: Tier, chunks: Sequence[ChunkBytes]) -> int:
        """Return how many bytes have their home in a tier."""
        slices = sum(
            chunks[state.chunk].slice_bytes(state.purpose)
            for state, home in self.homes.items()
            if home is tier
        )
        if tier is Tier.ACCELERATOR:
            return slices
        copies = (c.copy_bytes for i, c in enumerate(chunks) if self.update_home(i) is tier)
        return slices + sum(copies)


def reside(working: Iterable[Tier], update: Iterable[Tier]) -> Residency:
    """Return the residency with these homes, chunk by chunk.

    Gradients of an update that lies on disk lie in host memory: they are added to before they are
    read, and live for a part of the step only.

    Example:
        >>> reside([Tier.ACCELERATOR], [Tier.HOST]).home(0, Purpose.MASTER)
        <Tier.HOST: 'host'>
    """
    homes: dict[State, Tier] = {}
    for chunk, (working_home, update_home) in enumerate(zip(working, update, strict=True)):
        homes[State(chunk, Purpose.WORKING)] = working_home
        for purpose in UPDATE_PURPOSES:
            homes[State(chunk, purpose)] = update_home
        if update_home is Tier.DISK:
            homes[State(chunk, Purpose.GRADIENT)] = Tier.HOST
    return Residency(homes)
