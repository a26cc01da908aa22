"""Who takes part: each contestant is a way to train the same model, made inside its own rank.

A contestant gives one function that does a whole step - forward, backward, update, gradients
released - and returns the loss. Nothing here measures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchmarks.gpt import GPT

Dtype = Literal["fp32", "bf16"]
Step = Callable[["Tensor"], "Tensor"]

BASELINE = "DDP"
FLOOR = "no communication"
LEARNING_RATE = 3e-4


class Way(Enum):
    """How training is spread over the ranks."""

    ALONE = "each rank by itself"
    DDP = "DistributedDataParallel"
    FSDP = "fully_shard on each block and the root, resharded after forward"
    FSDP_KEPT = "fully_shard, kept gathered until backward, reduced in the parameters' dtype"
    SHARDWISE = "shardwise.shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A named way to train."""

    name: str
    way: Way = Way.SHARDWISE
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``shardwise.shard``."""


CONTESTANTS = (
    Contestant(name=BASELINE, way=Way.DDP),
    Contestant(name=FLOOR, way=Way.ALONE),
    Contestant(name="DDP again (A/A)", way=Way.DDP),
    Contestant(name="FSDP2", way=Way.FSDP),
    Contestant(name="FSDP2, kept", way=Way.FSDP_KEPT),
    Contestant(name="shardwise stage 0", options={"stage": 0}),
    Contestant(name="shardwise stage 1", options={"stage": 1}),
    Contestant(name="shardwise stage 2", options={"stage": 2}),
    Contestant(name="shardwise stage 3", options={"stage": 3}),
    Contestant(
        name="shardwise stage 3, kept", options={"stage": 3, "reshard_after_forward": False}
    ),
)


def make_step(contestant: Contestant, model: GPT, *, dtype: Dtype, chunk_bytes: int | None) -> Step:
    """Wrap the model as the contestant does and return its step."""
    match contestant.way:
        case Way.ALONE:
            return _plain_step(model, _autocast(dtype))
        case Way.DDP:
            return _plain_step(DistributedDataParallel(model), _autocast(dtype))
        case Way.FSDP | Way.FSDP_KEPT:
            _fully_shard(model, dtype, is_kept=contestant.way is Way.FSDP_KEPT)
            return _plain_step(model, contextlib.nullcontext)
        case Way.SHARDWISE:
            return _sharded_step(contestant, model, dtype=dtype, chunk_bytes=chunk_bytes)


def _sharded_step(
    contestant: Contestant, model: GPT, *, dtype: Dtype, chunk_bytes: int | None
) -> Step:
    """Train with shardwise."""
    precision = sw.MixedPrecision(param_dtype=torch.bfloat16) if dtype == "bf16" else None
    sw.shard(model, mixed_precision=precision, chunk_bytes=chunk_bytes, **contestant.options)
    optimizer = sw.ShardedOptimizer(_adamw(model))

    def step(tokens_BT: Tensor) -> Tensor:
        loss = model(tokens_BT)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _fully_shard(model: GPT, dtype: Dtype, *, is_kept: bool) -> None:
    """Apply FSDP2 as its documentation does."""
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        reduce_dtype = torch.bfloat16 if is_kept else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=not is_kept, mp_policy=policy)


def _autocast(dtype: Dtype) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return how plain PyTorch trains in a dtype."""
    return partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=dtype == "bf16")


def _plain_step(
    model: nn.Module, autocast: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Step:
    """Train as users of plain PyTorch and its wrappers do."""
    optimizer = _adamw(model)

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
