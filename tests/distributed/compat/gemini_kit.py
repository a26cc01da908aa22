"""Build a `ZeroDDP` under a placement policy, with its `ZeroOptimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.compat.colossalai import (
    ChunkManager,
    GeminiManager,
    HybridAdam,
    ZeroDDP,
    ZeroOptimizer,
)
from tests.distributed.compat.zero_ddp_kit import exact
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.models import Case

STATIC: tuple[dict[str, Any], ...] = (
    {"policy": "static", "shard_param_frac": 0.0},
    {"policy": "static"},
    {"policy": "static", "shard_param_frac": 0.5, "offload_optim_frac": 0.5},
    {"policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 1.0},
)
POLICIES: tuple[dict[str, Any], ...] = (
    {"policy": "cuda"},
    {"policy": "cpu"},
    {"policy": "const"},
    *STATIC,
)
"""Every policy that chooses by names and fractions alone; "auto" needs a measured step."""

CHUNK_NUMEL = 5000


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """What `HybridAdam` is, for the oracle."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def hybrid_adam(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a script."""
    return HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1)


def manager_of(
    policy: str, *, keep_gathered: bool = False, chunk_numel: int = CHUNK_NUMEL, **settings: Any
) -> GeminiManager:
    """Make a manager for all ranks."""
    entry = {"chunk_size": chunk_numel, "keep_gathered": keep_gathered}
    return GeminiManager(policy, ChunkManager({dist.get_world_size(): entry}), **settings)


def build(
    build_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = hybrid_adam,
    *,
    manager: GeminiManager,
    dtype: torch.dtype | None = torch.bfloat16,
    ddp: dict[str, Any] | None = None,
    **zero: Any,
) -> tuple[ZeroDDP, ZeroOptimizer]:
    """Wrap the model that all ranks start with; scale 1 changes no bit of float16."""
    torch.manual_seed(0)
    model = ZeroDDP(build_model(), manager, mixed_precision=dtype, **ddp or {})
    zero = {"initial_scale": 1.0, **zero}
    return model, ZeroOptimizer(make_optimizer(model), model, **zero)


def take_step(model: ZeroDDP, optimizer: ZeroOptimizer, case: Case, step: int) -> float:
    """Train one step on this rank and return its loss; a step needs no `zero_grad`."""
    seed(step=step, rank=dist.get_rank(), micro_batch=0)
    loss = case.loss(model)
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


def check(
    case: Case,
    manager: GeminiManager,
    *,
    what: str,
    dtype: torch.dtype | None = torch.bfloat16,
    between: Callable[[ZeroDDP], object] = lambda _: None,
    **zero: Any,
) -> tuple[ZeroDDP, ZeroOptimizer]:
    """Train three steps and compare losses and exact values with one process, to the bit.

    Args:
        case: Model and loss.
        manager: Policy and chunks.
        what: For messages.
        dtype: Of the working parameters.
        between: Called on the model before each step, and between backward and step.
        zero: Arguments of `ZeroOptimizer`.
    """
    options = OracleOptions(world_size=dist.get_world_size(), param_dtype=dtype)
    records = run_oracle(case.build, adam, case.loss, options)
    model, optimizer = build(case.build, manager=manager, dtype=dtype, **zero)
    rank = dist.get_rank()
    for step, record in enumerate(records):
        between(model)
        seed(step=step, rank=rank, micro_batch=0)
        loss = case.loss(model)
        assert loss.item() == record.losses[rank][0], f"{what}, step {step}"
        optimizer.backward(loss)
        between(model)
        optimizer.step()
        assert_bit_equal(exact(model), record.parameters, what=f"{what}, step {step}")
        assert model.chunk_manager is not None
        assert model.chunk_manager.accessed_mem == 0, f"{what}, step {step}"
    return model, optimizer


def host_bytes(model: ZeroDDP) -> int:
    """Bytes that rest in host memory on this rank."""
    assert model.chunk_manager is not None
    return model.chunk_manager.total_mem["cpu"]


def numel_of(model: nn.Module) -> int:
    """Number of elements of all parameters, on all ranks together."""
    return sum(p.numel() for p in model.parameters())


def rounded_model(case: Case, parameters: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Module:
    """Return the plain model with these values, rounded."""
    torch.manual_seed(0)
    model = case.build()
    model.load_state_dict({n: v.detach() for n, v in parameters.items()}, strict=False)
    return model.to(dtype)


BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)
