"""The trainer's calls to shardwise: everything else here is plain torch.

``sw.shard`` shards the model in place and ``sw.ShardedOptimizer`` wraps the optimizer; the rest of
this file chooses what to pass them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

import shardwise as sw
from shardwise.cli.train.model import GPT, build_model
from shardwise.cli.train.recipe import DTYPES, adamw, passes, schedule
from shardwise.errors import mismatch

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

    from shardwise.cli.train.config import ShardConfig, TrainConfig

_BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A sharded model with what trains it."""

    model: GPT
    optimizer: sw.ShardedOptimizer
    scheduler: LambdaLR
    passes: list[list[int]]
    """Micro-batches of a step, grouped by what one reduction over ranks covers."""


def build_learner(config: TrainConfig, device: torch.device) -> Learner:
    """Build the model, shard it, wrap AdamW, attach the schedule; collective, on all ranks."""
    model = build_model(config.model, sequence=config.data.sequence, seed=config.run.seed)
    sw.shard(
        model.to(device),
        stage=config.shard.stage,
        mixed_precision=mixed_precision(config.shard.precision),
        shard_size=config.shard.shard_size,
        chunk_bytes=config.shard.chunk_bytes,
        offload=offload(config.shard),
    )
    optimizer = sw.ShardedOptimizer(
        adamw(model.parameters(), config.optimizer),
        clip_grad_norm=config.optimizer.clip_grad_norm or None,
    )
    return Learner(
        model=model,
        optimizer=optimizer,
        scheduler=schedule(optimizer, config),
        passes=passes(config),
    )


def mixed_precision(precision: str) -> sw.MixedPrecision | None:
    """Return 16-bit weights with fp32 masters, or None for fp32."""
    return None if precision == "fp32" else sw.MixedPrecision(param_dtype=DTYPES[precision])


def offload(config: ShardConfig) -> sw.StaticOffload | sw.AdaptiveOffload | None:
    """Return what rests off the accelerator, None if nothing does."""
    fractions = fixed_offload(config)
    sizes = (config.accelerator_budget, config.host_budget, config.disk_budget)
    if all(size is None for size in (*sizes, config.disk_path)):
        return fractions
    if fractions is not None:
        raise sw.ConfigurationError(
            mismatch(
                "offload",
                expected="budgets or fractions",
                got="both",
                fix="leave --offload-optimizer and --offload-parameters out",
            )
        )
    accelerator, host, disk = (
        int(size) if isinstance(size, str) and size.isdecimal() else size for size in sizes
    )  # the number of bytes that a refusal names
    budget = sw.Budget(accelerator=accelerator, host=host, disk=disk, disk_path=config.disk_path)
    return sw.AdaptiveOffload(budget)


def fixed_offload(config: ShardConfig) -> sw.StaticOffload | None:
    """Return fractions that rest off the accelerator, None for none."""
    if not (config.offload_optimizer or config.offload_parameters):
        if config.offload_path is None:
            return None
        raise sw.ConfigurationError(
            mismatch(
                "--offload-path",
                expected="a fraction to offload beside it",
                got="none",
                fix="add --offload-optimizer 1, or leave the path out",
            )
        )
    return sw.StaticOffload(
        optimizer=config.offload_optimizer,
        parameters=config.offload_parameters,
        to="host" if config.offload_path is None else "disk",
        disk_path=config.offload_path,
    )


def settle_precision(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Replace the precision "auto" by the one that this device computes fast in."""
    if config.shard.precision != "auto":
        return config
    precision = "bf16" if has_bf16_instructions(device) else "fp32"
    return replace(config, shard=replace(config.shard, precision=precision))


def has_bf16_instructions(device: torch.device) -> bool:
    """Tell whether bf16 is computed in hardware; without that it is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name, False)) for name in _BF16_INSTRUCTIONS)
