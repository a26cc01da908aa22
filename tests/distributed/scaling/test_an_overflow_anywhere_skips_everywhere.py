"""A non-finite gradient on one rank, or in one owner's part, skips the step on all ranks alike."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import FACES, Face, assert_same_state, parameters, stages_of


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(40))
        self.last = nn.Parameter(torch.ones(40))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.first * x).sum() + (self.last * y).sum()


def _make(face: Face, stage: int, dtype: torch.dtype) -> tuple[nn.Module, sw.ShardedOptimizer]:
    scale = sw.LossScale(initial_scale=2.0, hysteresis=1)
    precision = sw.MixedPrecision(param_dtype=dtype, loss_scale=scale)
    model = _Model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    if face == "module":
        sw.shard(model, stage=stage, mixed_precision=precision)
        return model, sw.ShardedOptimizer(inner)
    return model, sw.ShardedOptimizer(inner, stage=stage, mixed_precision=precision)


def _step(model: nn.Module, optimizer: sw.ShardedOptimizer, loss: Tensor) -> None:
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("face", FACES)
def test_an_overflow_anywhere_skips_everywhere(face: Face, dtype: torch.dtype) -> None:
    """On rank 0, on the last rank, and from every rank in one element of one owner."""
    for value in (math.inf, -math.inf, math.nan):
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        for stage in stages_of(face):
            for where in ("rank 0", "last rank", "last element"):
                model, optimizer = _make(face, stage, dtype)
                good = torch.full((40,), 0.5, dtype=dtype)
                _step(model, optimizer, model(good, good))
                before, state = parameters(model), optimizer.state_dict()
                bad = good.clone()
                bad[-1] = value
                hits = where == "last element" or rank == (0 if where == "rank 0" else last)
                _step(model, optimizer, model(good, bad if hits else good))
                assert optimizer.last_step_skipped, (stage, where)
                expected_scale = 1.0 if dtype is torch.float16 else optimizer.loss_scale
                assert optimizer.loss_scale == expected_scale
                assert_bit_equal(parameters(model), before)
                after = optimizer.state_dict()
                after.pop("shardwise", None)
                state.pop("shardwise", None)
                assert_same_state(after, state)
                _step(model, optimizer, model(good, good))
                assert not optimizer.last_step_skipped
                assert all((v != before[n]).all() for n, v in parameters(model).items())
