"""Backward over a graph that an update has overtaken raises, as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.kit.pair import FACES, Face, stages_of


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_graph_older_than_a_step_is_refused(face: Face, param_dtype: torch.dtype | None) -> None:
    for stage in stages_of(face):
        model = _model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        precision = None if param_dtype is None else sw.MixedPrecision(param_dtype=param_dtype)
        if face == "module":
            sw.shard(model, stage=stage, mixed_precision=precision)
            optimizer = sw.ShardedOptimizer(inner)
        else:
            optimizer = sw.ShardedOptimizer(inner, stage=stage, mixed_precision=precision)
            model.to(param_dtype or torch.float32)
        x = torch.ones(2, 7, dtype=param_dtype)
        losses = [model(x).float().square().mean() for _ in range(2)]
        optimizer.backward(losses[0])
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"inplace operation|a step has updated"):
            losses[1].backward()
        optimizer.zero_grad()
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
