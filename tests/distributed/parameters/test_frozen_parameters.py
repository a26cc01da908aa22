"""Frozen parameters and adapters: no gradient, no state, and no gather that backward can spare."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.report import held_bytes
from tests.kit.pair import Pair, Setting, adamw


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank one beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted(width) for _ in range(3))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def loss(model, rank):
    return model(torch.randint(11, (2, 4))).square().mean()


@pytest.mark.world_size(2, 3)
def test_adapters_train_like_one_process() -> None:
    for options in ({}, {"chunk_bytes": 512}, {"reshard_after_forward": False}):
        Pair(Model, adamw, setting=Setting(stage=3, shard=options)).train(loss)


@pytest.mark.world_size(2)
def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = sw.shard(Model(256))
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters()))
    optimizer.backward(loss(model, 0))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = held_bytes(model, optimizer)
    assert held.gradients <= 1.1 * 4 * trainable / 2 + 1024
    optimizer.step()
    held = held_bytes(model, optimizer)
    assert held.optimizer_state <= 1.1 * 8 * trainable / 2 + 1024


@pytest.mark.world_size(2)
def test_backward_gathers_only_values_that_gradients_depend_on() -> None:
    """The first frozen block lies below every trainable parameter: backward never reaches it."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))
            self.blocks[:3].requires_grad_(False)

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x.sum()

    model = sw.shard(Stack())
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    [engine] = optimizer._binding.engines()
    gatherer = engine.residence.gatherer
    gathered: list[int] = []
    start = gatherer._start

    def record(chunk) -> None:
        gathered.append(chunk.index)
        start(chunk)

    gatherer._start = record
    frozen = {c.index for c in engine.chunks if not c.records[0].parameter.requires_grad}
    for _ in range(3):
        out = model(torch.randn(2, 64))
        gathered.clear()
        optimizer.backward(out)
        assert gathered
        assert frozen.isdisjoint(gathered)
        optimizer.step()
