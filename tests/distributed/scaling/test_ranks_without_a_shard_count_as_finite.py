"""Ranks that own no trainable element follow the loss scale of those that do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import STAGES, parameters


class _Head(nn.Module):
    """A big frozen embedding and three trainable numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 3).requires_grad_(False)
        self.head = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) @ self.head


@pytest.mark.world_size(4, timeout_s=20)
@pytest.mark.parametrize("uses_head", [True, False])
def test_ranks_without_a_shard_count_as_finite(uses_head: bool) -> None:
    """Without any gradient at all there is nothing to skip and nothing to count."""
    scale = sw.LossScale(initial_scale=16.0, growth_interval=1)
    precision = sw.MixedPrecision(param_dtype=torch.float16, loss_scale=scale)
    for stage in STAGES:
        model = sw.shard(_Head(), stage=stage, mixed_precision=precision)
        optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        before = parameters(model)["head"]
        for _ in range(3):
            if uses_head:
                optimizer.backward(model(torch.arange(5)).float().mean())
            optimizer.step()
            optimizer.zero_grad()
            assert not optimizer.last_step_skipped
        assert optimizer.loss_scale == (128.0 if uses_head else 16.0)
        assert (parameters(model)["head"] != before).all() == uses_head
