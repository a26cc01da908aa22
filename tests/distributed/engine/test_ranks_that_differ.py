"""Ranks whose data takes other paths through the model still reduce the same things together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw


def layers(count: int, width: int = 4) -> nn.Module:
    module = nn.Module()
    for index in range(count):
        setattr(module, f"p{index}", nn.Parameter(torch.zeros(width)))
    return module


def values(optimizer, module: nn.Module) -> list[float]:
    with sw.full_parameters(module):
        return [p.detach()[0].item() for p in module.parameters()]


def use(module: nn.Module, factors: dict[int, float]) -> torch.Tensor:
    return sum(getattr(module, f"p{i}").sum() * f for i, f in factors.items())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_chunk_used_again_keeps_its_place_in_the_order(stage: int) -> None:
    module = sw.shard(layers(4), stage=stage, chunk_bytes=16)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(module.parameters(), lr=1.0))
    rank = dist.get_rank()
    # step 1: nobody uses p2; step 2: everybody does, and rank 0 leaves p1 out
    optimizer.backward(use(module, {0: 1, 1: 1, 3: 1}))
    optimizer.step()
    optimizer.zero_grad()
    before = values(optimizer, module)
    factors = {0: 10, 1: 20, 2: 30, 3: 40}
    if rank == 0:
        del factors[1]
    optimizer.backward(use(module, factors))
    optimizer.step()
    after = values(optimizer, module)
    assert [b - a for a, b in zip(after, before, strict=True)] == [10, 10, 30, 40]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_without_a_pass_shares_the_loss_scale(stage: int) -> None:
    module = layers(2, width=64).half()
    scale = sw.LossScale(initial_scale=1024.0)
    sw.shard(module, stage=stage, mixed_precision=sw.MixedPrecision(loss_scale=scale))
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(module.parameters(), lr=1.0))
    if dist.get_rank() == 0:
        optimizer.backward(use(module, {0: 1.0, 1: 1.0}))
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(0.5 * 128**0.5)
    assert values(optimizer, module) == [-0.5, -0.5]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_without_a_pass_weighs_nothing(stage: int) -> None:
    module = sw.shard(layers(2, width=64), stage=stage)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(module.parameters(), lr=1.0))
    if dist.get_rank() == 0:
        optimizer.backward(use(module, {0: 6.0, 1: 3.0}), weight=3)
    optimizer.step()
    assert values(optimizer, module) == [-2.0, -1.0]


@pytest.mark.world_size(2)
def test_a_removed_gradient_is_gone_on_ranks_that_do_not_use_its_parameter_again() -> None:
    module = sw.shard(layers(2), stage=2)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(module.parameters(), lr=0.0))
    use(module, {0: 100.0, 1: 100.0}).backward()
    optimizer.step()
    module.zero_grad()
    use(module, {0: 1.0} if dist.get_rank() else {1: 1.0}).backward()
    for parameter in module.parameters():
        gradient = sw.full_gradient(parameter)
        assert gradient is not None
        assert gradient.tolist() == [0.5] * 4


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("clear", ["module", "zeros", "optimizer"])
def test_weights_belong_to_one_step_however_it_is_cleared(clear: str) -> None:
    module = sw.shard(layers(2), stage=2)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(module.parameters(), lr=1.0))
    for step in range(1, 4):
        optimizer.backward(use(module, {0: 4.0, 1: 4.0}), weight=4)
        optimizer.step()
        assert values(optimizer, module) == [-float(step)] * 2
        if clear == "module":
            module.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=clear == "optimizer")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_two_models_under_one_optimizer_do_not_mix(stage: int) -> None:
    first = sw.shard(layers(3), stage=stage, chunk_bytes=16)
    second = sw.shard(layers(3), stage=stage, chunk_bytes=16)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    for step in range(3):
        one, other = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 10.0, 1: 20.0, 2: 30.0}
        if dist.get_rank() == step % 2:
            del one[1], other[2]
        optimizer.backward(use(first, one) + use(second, other))
        optimizer.step()
        optimizer.zero_grad()
    assert values(optimizer, first) == [-3.0, -3.0, -9.0]
    assert values(optimizer, second) == [-30.0, -60.0, -45.0]
