"""Build a `ZeroDDP` with its optimizer, and read what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.compat.colossalai import ZeroDDP
from shardwise.runtime.chunk import Presence
from shardwise.runtime.managed import record_of
from shardwise.shard import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable

MODES: tuple[dict[str, Any], ...] = (
    {},
    {"strict_ddp_mode": True},
    {"reshard_after_forward": False},
)
"""Parameters sharded, whole on every rank, and sharded but whole between forward and step."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with a step size that moves every weight visibly."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD whose update is the gradient."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def build(
    build_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    **arguments: Any,
) -> tuple[ZeroDDP, sw.ShardedOptimizer]:
    """Wrap the model that all ranks start with, and make its optimizer.

    float16 starts at scale 1, where scaling changes no bit.
    """
    torch.manual_seed(0)
    arguments = {"loss_scale": sw.LossScale(initial_scale=1.0), **arguments}
    model = ZeroDDP(build_model(), **arguments)
    return model, sw.ShardedOptimizer(make_optimizer(model))


def exact(model: ZeroDDP) -> dict[str, Tensor]:
    """Return what is updated, whole, on every rank. Collective."""
    state = model.state_dict(only_rank_0=False)
    return {name: state[name] for name, _ in model.named_parameters()}


def gradients(model: ZeroDDP) -> dict[str, Tensor | None]:
    """Gather the reduced gradients of sharded parameters, in their dtype. Collective."""
    named = {n: (p, sw.full_gradient(p)) for n, p in model.named_parameters() if record_of(p)}
    return {name: None if g is None else g.to(p.dtype) for name, (p, g) in named.items()}


def is_at_rest(model: ZeroDDP) -> bool:
    """Return whether no chunk is whole that need not be."""
    presences = {chunk.presence for chunk in engine_of(model.module).chunks}
    return presences <= {Presence.RESIDENT, Presence.RELEASED}
