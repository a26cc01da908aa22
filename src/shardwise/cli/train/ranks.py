"""This process among the others: which rank it is, how many there are, what they agree on.

The only place of the trainer that reads torchrun's environment or calls a collective itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.errors import ConfigurationError, DivergenceError, mismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this process stands; one process without a launcher is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine."""
    local_world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Ranks:
        """Read what torchrun says."""
        source = os.environ if environment is None else environment
        return cls(
            rank=int(source.get("RANK", "0")),
            world_size=int(source.get("WORLD_SIZE", "1")),
            local_rank=int(source.get("LOCAL_RANK", "0")),
            local_world_size=int(source.get("LOCAL_WORLD_SIZE", "1")),
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks and writes files."""
        return self.rank == 0

    def share_processor(self) -> int:
        """Give each process of this machine its equal part of the cores, and return that number.

        torchrun leaves one thread per process unless told otherwise, which wastes the other cores
        of a machine with more cores than ranks. A process on its own keeps torch's choice.
        """
        if self.local_world_size > 1:
            torch.set_num_threads(max(1, num_cores() // self.local_world_size))
        return torch.get_num_threads()

    def device(self, choice: str) -> torch.device:
        """Return the device of this rank: the processor, or its own accelerator."""
        found = torch.accelerator.current_accelerator(check_available=True)
        if choice == "cpu" or found is None:
            return torch.device("cpu")
        device = torch.device(found.type, self.local_rank)
        torch.accelerator.set_device_index(self.local_rank)
        return device

    def gather(self, numbers: Sequence[float], *, device: torch.device) -> list[list[float]]:
        """Return every rank's numbers, in rank order; one small all-gather, on all ranks.

        float64 carries integers up to 2**53 exactly, so byte counts pass unharmed.
        """
        if self.world_size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        everyone = mine.new_empty(self.world_size * len(numbers))
        dist.all_gather_single(everyone, mine)
        return everyone.view(self.world_size, len(numbers)).tolist()

    def share(self, value: T) -> T:
        """Return the first rank's value on all ranks; one small broadcast, on all ranks."""
        if self.world_size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def leave(self) -> None:
        """Take the process group down, so that no rank ends while another still talks to it."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def check_device(choice: str) -> None:
    """Refuse an accelerator that this machine does not have."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if choice in ("auto", "cpu") or (found is not None and found.type == choice):
        return
    raise ConfigurationError(
        mismatch(
            "--device",
            expected="a device of this machine, auto or cpu",
            got=choice,
            where="no accelerator found" if found is None else f"there is {found.type}",
            fix="drop it, or install a torch build that knows the device",
        )
    )


def is_of_lost_rank(error: RuntimeError) -> bool:
    """Return whether a communication failed, as it does once another rank has ended."""
    is_named = isinstance(error, (DivergenceError, dist.DistError))
    return is_named or "by peer" in str(error)  # gloo knows no type of its own


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
