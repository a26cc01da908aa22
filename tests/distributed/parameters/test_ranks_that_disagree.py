"""Ranks that go different ways end in an error that names them, not in a hang."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw


class Ways(nn.Module):
    """Blocks of equal size, run in an order that may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x):
        for number in self.order:
            x = self.blocks[number](x)
        return x.sum()


@pytest.mark.world_size(2, 3, timeout_s=40)
@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 1, 2], [0, 1, 2, 3, 0]])
def test_another_order_ends_in_a_divergence_error_on_all_ranks(order) -> None:
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=3))
    model = sw.shard(Ways(), mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.backward(model(torch.randn(2, 8)))
            optimizer.step()
            optimizer.zero_grad()

    train(2)
    if dist.get_rank() == 1:
        model.order = order
    with pytest.raises(sw.DivergenceError, match=r"rank 1 was at step [23]: .*") as caught:
        train(3)
    assert "rank 0 was at" in str(caught.value)
    assert "chunk" in str(caught.value)
