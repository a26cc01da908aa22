"""Who takes part: each contestant is a way to train the same model, made inside its own rank.

A contestant gives one function that does a whole step - forward, backward, update, gradients
released - and returns the loss. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw

if TYPE_CHECKING:
    from torch import Tensor, nn

Dtype = Literal["fp32", "bf16"]
Step = Callable[["Tensor"], "Tensor"]

BASELINE = "DDP"
FLOOR = "no communication"
LEARNING_RATE = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A named way to train."""

    name: str
    stage: int | None
    """Of shardwise; None is DistributedDataParallel."""
    communicates: bool = True
    """False: each rank trains alone, which no way to train in parallel can be much faster than."""


CONTESTANTS = (
    Contestant(name=BASELINE, stage=None),
    Contestant(name=FLOOR, stage=None, communicates=False),
    Contestant(name="DDP again (A/A)", stage=None),
    Contestant(name="shardwise stage 0", stage=0),
    Contestant(name="shardwise stage 1", stage=1),
    Contestant(name="shardwise stage 2", stage=2),
)


def make_step(
    contestant: Contestant, model: nn.Module, *, dtype: Dtype, chunk_bytes: int | None
) -> Step:
    """Wrap the model as the contestant does and return its step."""
    if contestant.stage is None:
        parallel = DistributedDataParallel(model) if contestant.communicates else model
        return _plain_step(parallel, dtype)
    precision = sw.MixedPrecision(param_dtype=torch.bfloat16) if dtype == "bf16" else None
    sw.shard(model, stage=contestant.stage, mixed_precision=precision, chunk_bytes=chunk_bytes)
    optimizer = sw.ShardedOptimizer(_adamw(model))

    def step(tokens_BT: Tensor) -> Tensor:
        loss = model(tokens_BT)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _plain_step(model: nn.Module, dtype: Dtype) -> Step:
    """Train as users of plain PyTorch and DistributedDataParallel do; bf16 means autocast."""
    optimizer = _adamw(model)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=dtype == "bf16")

    def step(tokens_BT: Tensor) -> Tensor:
        with autocast():
            loss = model(tokens_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
