"""Several sharded models in one process: adversaries, a frozen teacher, two losses at once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters

STEPS = 4


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def build(seed: int, *widths: int, sharded: bool, **options):
    """Return a model and its optimizer, with one way to call backward."""
    torch.manual_seed(seed)
    model = mlp(*widths)
    if not sharded:
        optimizer = sgd(model)
        return model, optimizer, lambda loss: loss.backward()
    sw.shard(model, **options)
    optimizer = sw.ShardedOptimizer(sgd(model))
    return model, optimizer, optimizer.backward


def adversaries(*, sharded: bool) -> dict[str, Tensor]:
    """The generator's gradient passes through the discriminator, which is frozen meanwhile."""
    generator, g_optimizer, g_backward = build(0, 3, 8, 5, sharded=sharded)
    critic, c_optimizer, c_backward = build(1, 5, 8, 1, sharded=sharded)
    for step in range(STEPS):
        torch.manual_seed(step)
        noise, real = torch.randn(4, 3), torch.randn(4, 5)
        c_optimizer.zero_grad()
        c_backward(critic(generator(noise).detach()).mean() - critic(real).mean())
        c_optimizer.step()
        critic.requires_grad_(False)
        g_optimizer.zero_grad()
        g_backward(-critic(generator(noise)).mean())
        g_optimizer.step()
        critic.requires_grad_(True)
    return {f"g{n}": v for n, v in parameters(generator).items()} | parameters(critic)


def distillation(*, sharded: bool) -> dict[str, Tensor]:
    """A frozen teacher runs without gradients, at a stage and in a dtype of its own."""
    student, optimizer, backward = build(0, 3, 8, 5, sharded=sharded)
    teacher, _, _ = build(1, 3, 16, 5, sharded=sharded, reshard_after_forward=False)
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(4, 3)
        with torch.no_grad():
            target = teacher(x)
        backward((student(x) - target).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return parameters(student) | {f"t{n}": v for n, v in parameters(teacher).items()}


def preferences(*, sharded: bool) -> dict[str, Tensor]:
    """Two forwards of the policy and of a reference before one backward, as DPO does."""
    policy, optimizer, backward = build(0, 3, 8, 1, sharded=sharded)
    reference, _, _ = build(0, 3, 8, 1, sharded=sharded)
    reference.requires_grad_(False)
    for step in range(STEPS):
        torch.manual_seed(step)
        chosen, rejected = torch.randn(4, 3), torch.randn(4, 3)
        margin = policy(chosen) - policy(rejected) - reference(chosen) + reference(rejected)
        backward(-nn.functional.logsigmoid(margin).mean())
        optimizer.step()
        optimizer.zero_grad()
    return parameters(policy)


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("train", [adversaries, distillation, preferences])
def test_models_together_train_like_one_process(train) -> None:
    """Every rank has the same batch, so the mean over ranks is the gradient of one."""
    assert_bit_equal(train(sharded=True), train(sharded=False))
