"""A model that is deleted while messages are on their way leaves ranks that still communicate."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.runtime import values


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_still_communicate_after_a_model_is_gone(stage, monkeypatch) -> None:
    """Gloo reads a connection no more once a message comes that nobody waits for."""
    is_late = dist.get_rank() == dist.get_world_size() - 1
    real = values.publish

    def publish_late(*arguments, **options):
        if is_late:
            time.sleep(0.3)
        return real(*arguments, **options)

    monkeypatch.setattr(values, "publish", publish_late)
    for _ in range(2):
        torch.manual_seed(0)
        model = sw.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), stage=stage)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()
        del model, optimizer
        gc.collect()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
