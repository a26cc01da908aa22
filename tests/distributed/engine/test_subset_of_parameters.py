"""An optimizer over some parameters of a sharded model is not disturbed by the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_do_not_pile_up_through_gradients_that_nobody_uses(stage: int) -> None:
    model, reference = sw.shard(build(), stage=stage), build()
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1))
    plain = torch.optim.SGD(reference[2].parameters(), lr=0.1)
    for step in range(3):
        inputs = [torch.randn(2 + r, 5) + step for r in range(2)]
        x = inputs[dist.get_rank()]
        optimizer.backward(model(x).square().sum(), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        (sum(reference(x).square().sum() for x in inputs) / sum(map(len, inputs))).backward()
        plain.step()
        for p, q in zip(model[2].parameters(), reference[2].parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(model[0].weight, build()[0].weight)


@pytest.mark.world_size(2)
def test_two_optimizers_share_one_sharded_model() -> None:
    model, reference = sw.shard(build(), stage=2), build()
    pairs = [
        (
            sw.ShardedOptimizer(torch.optim.AdamW(one.parameters(), lr=lr)),
            torch.optim.AdamW(other.parameters(), lr=lr),
        )
        for one, other, lr in [(model[0], reference[0], 1e-2), (model[2], reference[2], 1e-3)]
    ]
    for step in range(4):
        inputs = [torch.randn(3, 5) + step + r for r in range(2)]
        pairs[0][0].backward(model(inputs[dist.get_rank()]).square().mean())
        (sum(reference(x).square().mean() for x in inputs) / 2).backward()
        for sharded, plain in pairs:
            sharded.step()
            plain.step()
        for sharded, plain in pairs:
            sharded.zero_grad()
            plain.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
