"""`optimizer.grad_norm` is the norm before the first clipping, as soon as there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.kit.pair import STAGES


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_grad_norm_is_that_before_clipping() -> None:
    for stage in STAGES:
        model = sw.shard(nn.Linear(4, 1, bias=False), stage=stage)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        for factor in (3.0, 5.0):
            optimizer.backward(model(torch.full((1, 4), factor)).sum())
            assert optimizer.clip_grad_norm_(1.0).item() == 2 * factor
            assert optimizer.grad_norm == 2 * factor
            assert optimizer.clip_grad_norm_(0.5).item() == pytest.approx(1.0)
            assert optimizer.grad_norm == 2 * factor
            optimizer.step()
            assert optimizer.grad_norm == 2 * factor
            optimizer.zero_grad()
