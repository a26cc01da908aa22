"""A model, its loss and one step, for the optimizer with the other library's names."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.compat.colossalai import LowLevelZeroOptimizer
from tests.kit.models import OddMLP
from tests.kit.oracle import seed

if TYPE_CHECKING:
    from collections.abc import Callable


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with a step that hides nothing."""
    return torch.optim.Adam(model.parameters(), lr=1.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD whose update is the gradient."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def loss_of(model: nn.Module) -> Tensor:
    """The loss of an `OddMLP` on inputs of its dtype, drawn from torch's generator."""
    x = torch.randn(4, 123)
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def build(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], **arguments: Any
) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    """Build the model that all ranks start with and wrap its optimizer."""
    torch.manual_seed(0)
    model = OddMLP()
    return model, LowLevelZeroOptimizer(make_optimizer(model), **arguments)


def backward(
    model: nn.Module,
    optimizer: LowLevelZeroOptimizer,
    *,
    step: int = 0,
    micro_batch: int = 0,
    local: bool = False,
) -> Tensor:
    """Run one pass of this rank."""
    seed(step=step, rank=dist.get_rank(), micro_batch=micro_batch)
    loss = loss_of(model)
    with optimizer.no_sync() if local else nullcontext():
        optimizer.backward(loss)
    return loss


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copy the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> dict[str, Tensor | None]:
    """Gather the reduced gradients."""
    return {name: optimizer.get_param_grad(p) for name, p in model.named_parameters()}
