"""The recorded order is a guess: another order, or no order, gives the same numbers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.kit.pair import Pair, Setting, sgd


class Shuffled(nn.Module):
    """Layers in an order drawn anew for each call, some of them twice or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(7))
        self.scale = nn.Parameter(torch.ones(6))
        self.order = list(range(7))

    def forward(self, x):
        for number in self.order:
            x = torch.tanh(self.layers[number](x) * self.scale)
        return x


def loss(model, rank):
    return model(torch.randn(3, 6)).square().mean()


@pytest.mark.world_size(2, 3, timeout_s=60)
@pytest.mark.parametrize("keep", [True, 400, False])
@pytest.mark.parametrize("prefetch_bytes", [0, 10_000, None])
def test_any_order_trains_like_one_process(keep, prefetch_bytes, monkeypatch) -> None:
    from shardwise.runtime import residence

    real = residence.Gatherer

    def gatherer(*args, **options):
        return real(*args, **options | {"prefetch_bytes": prefetch_bytes})

    monkeypatch.setattr(residence, "Gatherer", gatherer)
    pair = Pair(Shuffled, sgd, setting=Setting(stage=3, shard={"reshard_after_forward": keep}))
    draw = random.Random(0)
    for step in range(8):
        order = list(range(7)) if step % 3 else [draw.randrange(7) for _ in range(6)]
        pair.both(lambda model, order=order: setattr(model, "order", order))
        pair.backward(loss)
        if step % 2:
            with torch.no_grad():  # an evaluation between backward and step
                pair.model(torch.ones(1, 6))
        pair.step()
        pair.check()


@pytest.mark.world_size(4, timeout_s=60)
def test_a_hybrid_mesh_gathers_inside_the_shard_group() -> None:
    shard = {"shard_size": 2}
    Pair(Shuffled, sgd, setting=Setting(stage=3, shard=shard, run_size=2)).train(loss)


@pytest.mark.world_size(2)
def test_evaluation_needs_no_training_and_leaves_nothing_behind() -> None:
    """Before the first step, between steps, many times in a row, as text generation does."""
    for keep in (True, 10_000, False):
        _evaluate_and_train(keep)


def _evaluate_and_train(keep) -> None:
    torch.manual_seed(0)
    plain = Shuffled()
    torch.manual_seed(0)
    model = sw.shard(Shuffled(), reshard_after_forward=keep)
    optimizer = sw.ShardedOptimizer(sgd(model))
    reference = sgd(plain)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for _ in range(3):
                    assert torch.equal(model(x), plain(x))
        [engine] = optimizer._binding.engines()
        assert (engine.residence.gatherer.gathered_bytes == 0) == (keep is True)
        model.eval()
        optimizer.backward(model(x).sum())
        plain(x).sum().backward()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        model.train()


@pytest.mark.world_size(2)
def test_after_an_error_the_next_step_is_a_fresh_one() -> None:
    class Fails(Shuffled):
        fails = False

        def forward(self, x):
            x = super().forward(x)
            if self.fails:
                raise ValueError("no")
            return x

    def train(pair: Pair) -> None:
        pair.backward(loss)
        pair.step()
        pair.check()

    pair = Pair(Fails, sgd, setting=Setting(stage=3))
    train(pair)
    pair.model.fails = True
    with pytest.raises(ValueError, match="no"):
        loss(pair.model, 0)
    pair.model.fails = False
    [engine] = pair.optimizer._binding.engines()
    assert not engine.residence.calls.is_running
    with pytest.raises(sw.ShardwiseError, match="full_parameters"):
        pair.model.scale.sum()
    train(pair)
    assert engine.residence.gatherer.gathered_bytes == 0
