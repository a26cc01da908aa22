"""Gradients are the mean (or, asked for, the sum) over ranks, on gloo too, which cannot average."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, adamw, full_gradients, stages_of


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 4)).square().mean()


@pytest.mark.world_size(1, 2, 3, 4, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_gradients_are_the_mean_over_ranks(face: Face) -> None:
    for stage in stages_of(face):
        setting = Setting(stage=stage, face=face)
        Pair(lambda: nn.Linear(4, 4, bias=False), adamw, setting=setting).train(_loss, num_steps=2)


@pytest.mark.world_size(2, 3, timeout_s=20)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_dtype_is_reduced_alike(reduction: str) -> None:
    """The joined batch of one process: powers of two, so every order of arithmetic is exact."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        size = dist.get_world_size()
        for stage in STAGES:
            model = nn.Linear(4, 4, bias=False).to(dtype)
            sw.shard(model, stage=stage, gradient_reduction=reduction)
            optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
            optimizer.backward(model(torch.full((1, 4), 2.0 ** dist.get_rank(), dtype=dtype)).sum())
            total = float(2**size - 1)
            expected = torch.full(
                (4, 4), total / size if reduction == "mean" else total, dtype=dtype
            )
            assert_bit_equal(full_gradients(model), {"weight": expected}, what=f"stage {stage}")
