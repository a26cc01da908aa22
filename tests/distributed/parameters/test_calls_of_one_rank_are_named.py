"""A collective call on one rank alone ends in an error that names the call, on every rank."""

from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw

if TYPE_CHECKING:
    from collections.abc import Callable


def _enter(model: nn.Module, _: sw.ShardedOptimizer) -> None:
    with sw.full_parameters(model):
        pass


CALLS: dict[str, Callable[[nn.Module, sw.ShardedOptimizer], object]] = {
    "state_dict() of the model": lambda model, _: model.state_dict(),
    "state_dict() of the optimizer": lambda _, optimizer: optimizer.state_dict(),
    "full_parameters()": _enter,
    "full_gradient()": lambda model, _: sw.full_gradient(model[0].weight),
}


@pytest.mark.world_size(2, timeout_s=40)
@pytest.mark.parametrize("call", CALLS)
def test_calls_of_one_rank_are_named(call: str) -> None:
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=3))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    sw.shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    def train() -> None:
        optimizer.backward(model(torch.randn(2, 8)).sum())
        optimizer.step()

    train()
    with pytest.raises(sw.DivergenceError) as caught:  # noqa: PT012
        if dist.get_rank() == 0:
            CALLS[call](model, optimizer)
        train()
    # gathers of one rank may meet those that the other starts for another reason
    assert re.search(rf"rank 0 was at step 1, (in|after) {re.escape(call)}: ", str(caught.value))
    assert "rank 1 was at step 1: " in str(caught.value)
