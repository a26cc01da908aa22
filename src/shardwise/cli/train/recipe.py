"""How a step is made, from the configuration: plain torch, the same for both trainings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim import AdamW

from shardwise.cli.train.schedule import warmup_then_cosine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

    from shardwise.cli.train.config import OptimizerConfig, TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of the weights that compute, by the precision's name."""


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> AdamW:
    """Return fused AdamW in two groups: matrices decay, the scales of the norms do not."""
    everything = list(parameters)
    groups = [
        {"params": [p for p in everything if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in everything if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def passes(config: TrainConfig) -> list[list[int]]:
    """Group a step's micro-batches by what one reduction over ranks covers.

    Below stage 2 a rank holds whole gradients anyway, so one reduction covers all micro-batches.
    From stage 2 on every micro-batch is reduced at once: that is what keeps whole gradients away.
    """
    micros = list(range(config.run.accumulation))
    return [micros] if config.shard.stage < 2 else [[micro] for micro in micros]


def schedule(optimizer: Optimizer, config: TrainConfig) -> LambdaLR:
    """Return the run's learning-rate schedule."""
    return warmup_then_cosine(
        optimizer,
        steps=config.run.steps,
        warmup_steps=config.optimizer.warmup_steps,
        final_fraction=config.optimizer.final_fraction,
    )
