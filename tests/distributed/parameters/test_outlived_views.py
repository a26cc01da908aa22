"""Tensors that outlive the release of their chunk, and graphs that outlive an update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.kit.pair import Pair, Setting


class KeepsView(torch.autograd.Function):
    """Keeps a view of the weight where no hook sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.transposed = weight.t()
        ctx.save_for_backward(x)
        return x @ ctx.transposed

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.transposed.t(), grad.t() @ x


class SavesWeight(torch.autograd.Function):
    """Saves the parameter itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Hanging(nn.Module):
    """Parameters in a list, used by functions and not by modules."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6)) for _ in range(5))
        self.function = function

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(self.function.apply(x, weight))
        return x


def loss(model, rank):
    return model(torch.randn(3, 6)).square().mean()


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("function", [KeepsView, SavesWeight])
def test_custom_functions_train_like_one_process(function) -> None:
    for options in ({}, {"chunk_bytes": 64}):
        setting = Setting(stage=3, shard=options)
        Pair(lambda: Hanging(function), setting=setting).train(loss)


@pytest.mark.world_size(2)
def test_a_graph_older_than_an_update_is_refused() -> None:
    """Plain PyTorch raises too: the saved weights were modified in place."""
    model = sw.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 4, requires_grad=True)
    optimizer.backward(model(x).sum())
    stale = model(x).sum()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="updated since"):
        optimizer.backward(stale)
    optimizer.zero_grad()
    optimizer.backward(model(x).sum())
    optimizer.step()


@pytest.mark.world_size(2)
def test_activations_written_after_they_were_saved_are_noticed() -> None:
    """Saved-tensor hooks switch torch's own check off."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = torch.exp(self.a(x))
            z = self.b(y)
            y.add_(1)
            return z.sum() + y.sum()

    for options in ({}, {"reshard_after_forward": False}):
        model = sw.shard(InPlace(), **options)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(torch.ones(2, 4)).backward()


@pytest.mark.world_size(2)
def test_gradient_penalties_train_like_one_process() -> None:
    """Double backward through saved handles."""

    def penalty(model, rank):
        x = torch.randn(3, 4, requires_grad=True)
        out = model(x).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return (grad.norm() - 1) ** 2 + out

    def build():
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    Pair(build, setting=Setting(stage=3)).train(penalty)


@pytest.mark.world_size(2)
def test_transforms_inside_forward_train_when_nothing_is_resharded() -> None:
    class PerSample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            def slope(row):
                return self.b(torch.tanh(self.a(row))).sum()

            return torch.func.vmap(torch.func.grad(slope))(x)

    def per_sample_loss(model, rank):
        return model(torch.randn(3, 4)).square().mean()

    setting = Setting(stage=3, shard={"reshard_after_forward": False})
    Pair(PerSample, setting=setting).train(per_sample_loss)
