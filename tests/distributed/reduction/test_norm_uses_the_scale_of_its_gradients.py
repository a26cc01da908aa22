"""Under float16 the norm is divided by the scale that made the gradients, not by the next one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.kit.pair import STAGES


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("reads", ["grad_norm", "clip_grad_norm_"])
def test_norm_uses_the_scale_of_its_gradients(reads: str) -> None:
    """Gradients are powers of two, exact in float16: the norm is that of float32 to the bit."""
    gradient = 2.0 ** torch.arange(-3.0, 3.0)
    expected = torch.linalg.vector_norm(gradient).item()
    scale = sw.LossScale(initial_scale=64.0, growth_interval=2)
    for stage in STAGES:
        model = _Weights()
        precision = sw.MixedPrecision(param_dtype=torch.float16, loss_scale=scale)
        sw.shard(model, stage=stage, mixed_precision=precision)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        scales = []
        for step in range(6):
            scales.append(optimizer.loss_scale)
            optimizer.backward(model(gradient))
            if reads == "clip_grad_norm_":
                assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(expected, rel=1e-6)
            optimizer.step()
            assert optimizer.grad_norm == pytest.approx(expected, rel=1e-6), (stage, step)
            optimizer.zero_grad()
        assert scales == [64.0, 64.0, 128.0, 128.0, 256.0, 256.0]
