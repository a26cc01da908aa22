"""Modules on the meta device get the values of an ordinary build, a unit at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.runtime import materialise
from tests.kit.oracle import assert_bit_equal


class Model(nn.Module):
    """Tied weights, a module that initialises its child, buffers, repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4)
        )
        self.attention = nn.MultiheadAttention(8, 2)
        self.statistics = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


@pytest.mark.world_size(1, 2, 3)
def test_values_are_those_of_an_ordinary_build_with_the_seed() -> None:
    for stage in (0, 1, 2, 3):
        torch.manual_seed(3)
        plain = Model()
        model = on_meta()
        weight = model.embedding.weight
        inner = torch.optim.AdamW(model.parameters())
        torch.manual_seed(3 + torch.distributed.get_rank())  # the first rank's draws count
        sw.shard(model, stage=stage)
        assert model.embedding.weight is model.head.weight is weight
        optimizer = sw.ShardedOptimizer(inner)
        assert_bit_equal(dict(model.state_dict()), dict(plain.state_dict()))
        optimizer.backward(model.head(model.embedding(torch.tensor([1]))).sum())
        optimizer.step()


@pytest.mark.world_size(2)
def test_no_rank_holds_more_than_a_few_units_of_values() -> None:
    held: list[int] = []
    real = materialise.Materialiser._initialise

    def count(self, group) -> None:
        real(self, group)
        held.append(sum(value.numel() for value in self._values.values()))

    materialise.Materialiser._initialise = count
    model = on_meta()
    numel = sum(p.numel() for p in model.parameters())
    sw.shard(model)
    assert max(held) < numel / 2


@pytest.mark.world_size(2)
def test_modules_without_an_initialiser_are_named_and_init_fn_helps() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.register_buffer("offset", torch.ones(2))

    def build() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(2, 2), Scale())

    model = build()
    with pytest.raises(sw.ConfigurationError, match=r"1 \(Scale\).*init_fn"):
        sw.shard(model)
    assert all(p.is_meta for p in model.parameters())

    def init(module: nn.Module) -> None:
        if isinstance(module, Scale):
            nn.init.constant_(module.scale, 2.0)
            module.offset.fill_(3.0)
        else:
            module.reset_parameters()

    sw.shard(model, init_fn=init)
    state = model.state_dict()
    assert state["1.scale"].tolist() == [2.0, 2.0]
    assert state["1.offset"].tolist() == [3.0, 3.0]


@pytest.mark.world_size(2)
def test_values_that_are_there_are_kept() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].bias = nn.Parameter(torch.full((2,), 7.0))
    model[1].running_mean = torch.full((2,), 5.0)
    sw.shard(model)
    state = model.state_dict()
    assert state["0.bias"].tolist() == [7.0, 7.0]
    assert state["1.running_mean"].tolist() == [5.0, 5.0]
    assert state["1.running_var"].tolist() == [1.0, 1.0]
