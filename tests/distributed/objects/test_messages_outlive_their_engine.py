"""A model that is deleted while messages are on their way leaves ranks that still communicate."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.runtime import reduction, values


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


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("is_frugal", [False, True])
def test_ranks_still_communicate_after_a_failed_backward(is_frugal, stage, monkeypatch) -> None:
    """The gradients that were on their way are received, though nobody wants them any more."""
    is_late = dist.get_rank() == dist.get_world_size() - 1
    real = reduction.ReduceScatter

    def start_late(*arguments, **options):
        if is_late:
            time.sleep(0.5)
        return real(*arguments, **options)

    monkeypatch.setattr(reduction, "ReduceScatter", start_late)
    offload = sw.AdaptiveOffload(sw.Budget(accelerator=2**20)) if is_frugal else None
    for _ in range(2):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64) for _ in range(4)]
        model = sw.shard(nn.Sequential(*layers), stage=stage, chunk_bytes=2**14, offload=offload)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        layers[0].register_full_backward_hook(_fail)
        output = model(torch.ones(2, 64, requires_grad=True))
        with pytest.raises(KeyError):
            optimizer.backward(output.sum())
        del model, optimizer, output, layers
        gc.collect()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()


def _fail(*_: object) -> None:
    raise KeyError
