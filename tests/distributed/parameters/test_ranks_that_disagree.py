"""Ranks that go different ways end in an error that names them, not in a hang."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from tests.kit.pair import Pair, Setting


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


class Head(nn.Module):
    """A head that is called as often as the data asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.between, self.head = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, num_calls: int):
        x = self.body(x)
        for _ in range(num_calls):
            x = torch.tanh(self.head(x))
        return self.between(x)


@pytest.mark.world_size(2, timeout_s=40)
def test_calls_of_a_unit_may_differ_where_chunks_are_kept() -> None:
    """One call on one rank, three on the other: nothing is gathered for the second and third."""
    setting = Setting(stage=3, shard={"reshard_after_forward": False})

    def loss(model, rank):
        return model(torch.randn(2, 8), 1 + 2 * rank).square().mean()

    Pair(Head, setting=setting).train(loss)


@pytest.mark.world_size(2, timeout_s=40)
def test_a_block_that_some_ranks_skip_inside_a_unit_trains_like_one_process() -> None:
    """Rank 0 calls every block and uses the parameters of some only."""

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.linear = number, nn.Linear(8, 8)

        def forward(self, x, skips):
            return x if self.number in skips else x + torch.tanh(self.linear(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(n) for n in range(8))

        def forward(self, x, skips):
            for block in self.blocks:
                x = block(x, skips)
            return x

    skips = ({2, 3, 6}, set())

    def loss(model, rank):
        return model(torch.randn(2, 8), skips[rank]).square().mean()

    Pair(Model, setting=Setting(stage=3)).train(loss, num_steps=4)


class Experts(nn.Module):
    """A block whose experts have chunks of their own; which of them run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, chosen):
        for number in chosen:
            x = x + torch.tanh(self.experts[number](x))
        return x


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x, chosen):
        for block in self.blocks:
            x = block(x, chosen)
        return x


@pytest.mark.world_size(2, timeout_s=40)
def test_an_expert_may_be_used_late_and_by_one_rank_alone() -> None:
    pair = Pair(Mixture, setting=Setting(stage=3, shard={"chunk_bytes": 64}))
    for step in range(6):
        late = [0, 1] if step >= 3 else [0]

        def loss(model, rank, late=late):
            return model(torch.randn(2, 8), late if rank == 0 else [2]).square().mean()

        pair.train(loss, num_steps=1)


@pytest.mark.world_size(4, timeout_s=40)
def test_replicas_may_evaluate_unevenly() -> None:
    """Chunks are gathered inside a shard group: the other group need not do the same."""
    pair = Pair(Mixture, setting=Setting(stage=3, shard={"shard_size": 2}, run_size=2))

    def loss(model, rank):
        return model(torch.randn(2, 8), [0, 1, 2]).square().mean()

    for _ in range(3):
        if dist.get_rank() < 2:
            with torch.no_grad():
                pair.model(torch.ones(1, 8), [0])
        pair.train(loss, num_steps=1)
