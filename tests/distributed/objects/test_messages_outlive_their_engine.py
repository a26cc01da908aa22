"""A model that is deleted while messages are on their way leaves ranks that still communicate."""

from __future__ import annotations

import copy
import gc
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import shardwise as sw
from shardwise.runtime import reduction, values
from shardwise.runtime.own_slices import OwnSlices
from tests.kit.pair import parameters


def hold_up_the_last_rank(monkeypatch, module, name: str, *, duration_s: float) -> None:
    """Let a function of a module begin later there, so that the others have to wait for it."""
    is_late = dist.get_rank() == dist.get_world_size() - 1
    real = getattr(module, name)

    def begin_late(*arguments, **options):
        if is_late:
            time.sleep(duration_s)
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, begin_late)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_still_communicate_after_a_model_is_gone(stage, monkeypatch) -> None:
    """Gloo reads a connection no more once a message comes that nobody waits for."""
    hold_up_the_last_rank(monkeypatch, values, "publish", duration_s=0.3)
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
@pytest.mark.parametrize(
    "offload",
    [
        None,
        sw.StaticOffload(optimizer=1.0),
        sw.AdaptiveOffload(sw.Budget(accelerator=2**20)),
    ],
    ids=["no offload", "host", "budget"],
)
def test_ranks_still_communicate_after_a_failed_backward(offload, stage, monkeypatch) -> None:
    """The gradients that were on their way are received, though nobody wants them any more."""
    hold_up_the_last_rank(monkeypatch, reduction, "ReduceScatter", duration_s=0.5)
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


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("copies", [1, 2])
def test_training_goes_on_after_gradients_that_had_no_room(stage, copies, monkeypatch) -> None:
    """What comes after the one that failed is received all the same, and thrown away."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    mesh = None
    if copies > 1:
        mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies))
    model = sw.shard(nn.Sequential(*layers), stage=stage, chunk_bytes=2**14, mesh=mesh)
    make = partial(torch.optim.SGD, lr=0.1)
    optimizer, oracle = sw.ShardedOptimizer(make(model.parameters())), make(plain.parameters())
    real, num_calls = OwnSlices.keep_gradient, 0

    def keep_gradient(self, gradient_S) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1 + dist.get_rank():
            raise sw.BudgetError("no room")
        real(self, gradient_S)

    output = model(torch.ones(2, 64))
    with monkeypatch.context() as patch:
        patch.setattr(OwnSlices, "keep_gradient", keep_gradient)
        with pytest.raises(sw.BudgetError, match="no room"):
            optimizer.backward(output.sum())
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(2, 64)).sum())
    optimizer.step()
    plain(torch.ones(2, 64)).sum().backward()
    oracle.step()
    assert_close(parameters(model), parameters(plain))
