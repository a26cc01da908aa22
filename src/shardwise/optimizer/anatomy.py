"""What a checkpoint needs to reach inside an optimizer, sharded or plain; it changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.optimizer.binding import Binding, Member
from shardwise.optimizer.sharded import ShardedOptimizer

if TYPE_CHECKING:
    import torch

    from shardwise.runtime.loss_scaling import LossScaler


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of one optimizer."""

    inner: torch.optim.Optimizer
    """The one that holds state."""
    groups: list[list[Member]]
    """The members of every group."""
    binding: Binding | None
    """What knows the pieces; None for a plain optimizer."""
    scaler: LossScaler | None
    """Loss scaling, where it is in force."""


def anatomy_of(optimizer: torch.optim.Optimizer) -> Anatomy:
    """Return the parts of an optimizer, with pieces that are views of the present slices."""
    if not isinstance(optimizer, ShardedOptimizer):
        groups = [[Member(p, None) for p in group["params"]] for group in optimizer.param_groups]
        return Anatomy(inner=optimizer, groups=groups, binding=None, scaler=None)
    optimizer._binding.refresh()
    return Anatomy(
        inner=optimizer.unwrap(),
        groups=optimizer._binding.groups,
        binding=optimizer._binding,
        scaler=optimizer._gradients.scaler,
    )
