"""Train a case with shardwise the way the oracle trains it in one process, and compare.

The same seeds before the same calls: what differs afterwards is the engine's doing.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

import shardwise as sw
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed
from tests.kit.pair import parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from tests.kit.models import Case

Face = Literal["module", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the matrix."""

    stage: int = 2
    face: Face = "module"
    """Shard the module, or let the optimizer shard parameters it is given."""
    num_steps: int = 3
    num_micro_batches: int = 1
    no_sync: bool = False
    """All micro-batches but the last are local."""
    clip_grad_norm: float | None = None
    norm_type: float = 2.0
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of `shard`."""

    @property
    def precision(self) -> sw.MixedPrecision | None:
        """The dtype policy; float16 starts at scale 1, where scaling changes no bit."""
        if self.param_dtype is None and self.reduce_dtype is None:
            return None
        return sw.MixedPrecision(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            loss_scale=sw.LossScale(initial_scale=1.0),
        )

    def oracle(self, world_size: int) -> OracleOptions:
        """The same in one process."""
        return OracleOptions(
            world_size=world_size,
            num_steps=self.num_steps,
            num_micro_batches=self.num_micro_batches,
            accumulate="local" if self.no_sync else "reduced",
            clip_grad_norm=self.clip_grad_norm,
            norm_type=self.norm_type,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
        )


def build(
    case: Case, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], setting: Setting
) -> tuple[nn.Module, sw.ShardedOptimizer]:
    """Return the sharded model and its optimizer; every rank builds the same values."""
    torch.manual_seed(0)
    model = case.build()
    clipping: dict[str, Any] = {
        "clip_grad_norm": setting.clip_grad_norm,
        "norm_type": setting.norm_type,
    }
    sharding: dict[str, Any] = {
        "stage": setting.stage,
        "mixed_precision": setting.precision,
        **setting.options,
    }
    if setting.face == "module":
        sw.shard(model, **sharding)
        return model, sw.ShardedOptimizer(make_optimizer(model), **clipping)
    return model, sw.ShardedOptimizer(make_optimizer(model), **clipping, **sharding)


def run_step(
    model: nn.Module, optimizer: sw.ShardedOptimizer, case: Case, setting: Setting, step: int
) -> list[float]:
    """Train one step on this rank and return the losses of its micro-batches."""
    losses = []
    for micro_batch in range(setting.num_micro_batches):
        is_local = setting.no_sync and micro_batch < setting.num_micro_batches - 1
        seed(step=step, rank=dist.get_rank(), micro_batch=micro_batch)
        with optimizer.no_sync() if is_local else nullcontext():
            loss = case.loss(model)
            optimizer.backward(loss)
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def assert_within_limits(optimizer: sw.ShardedOptimizer) -> None:
    """No tier of an engine with budgets ever held more than its budget."""
    for engine in optimizer._binding.engines():
        if engine.adaptation is None or engine.offload is None:
            continue
        limits, tiers = engine.adaptation.limits, engine.offload.mover.tiers
        disk_bytes = 0 if tiers.disk is None else tiers.disk.peak_bytes
        for peak_bytes, limit_bytes in (
            (engine.meter.peak_bytes, limits.accelerator_bytes),
            (tiers.host.peak_bytes, limits.host_bytes),
            (disk_bytes, limits.disk_bytes),
        ):
            assert limit_bytes is None or peak_bytes <= limit_bytes, engine.meter.peak


def updated_values(model: nn.Module, optimizer: sw.ShardedOptimizer) -> dict[str, Tensor]:
    """What the optimizer updates, whole: masters where there are some, else the parameters."""
    values = parameters(model)
    masters = optimizer.state_dict().get("shardwise", {}).get("masters", {})
    names = list(values)
    return values | {names[index]: master for index, master in masters.items()}


def assert_like_one_process(
    case: Case,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    setting: Setting,
    *,
    atol: float = 0.0,
) -> None:
    """Train with shardwise and with the oracle and compare losses, norms and parameters.

    Args:
        case: Model and loss.
        make_optimizer: Over all parameters of a model, in order.
        setting: How to train.
        atol: Largest allowed difference of a parameter; 0 asks for equal bits.
    """
    expected = run_oracle(
        case.build, make_optimizer, case.loss, setting.oracle(dist.get_world_size())
    )
    model, optimizer = build(case, make_optimizer, setting)
    for step, record in enumerate(expected):
        losses = run_step(model, optimizer, case, setting, step)
        where = f"step {step}, {setting}"
        rank = dist.get_rank()
        if atol == 0:
            assert losses == record.losses[rank], where
        assert math.isclose(optimizer.grad_norm, record.grad_norm, rel_tol=1e-4), (
            where,
            optimizer.grad_norm,
            record.grad_norm,
        )
    assert_within_limits(optimizer)
    actual = updated_values(model, optimizer)
    if atol == 0:
        assert_bit_equal(actual, expected[-1].parameters, what=str(setting))
        return
    for name, value in expected[-1].parameters.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m} ({setting})"
        )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with a step size that moves every weight visibly."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The same, by the fused kernel."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
