"""An update that has begun ends, whatever state it makes; refusals come before one, everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.budgets import asked_bytes
from tests.kit.offloaded import tiers_of
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters

WIDTH, DEPTH, SAMPLES = 64, 6, 8
CHUNK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def build(make, budget: sw.Budget | None = None):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    offload = None if budget is None else sw.AdaptiveOffload(budget)
    sw.shard(model, units=[nn.Linear], chunk_bytes=CHUNK_BYTES, offload=offload)
    return model, sw.ShardedOptimizer(make(model.parameters(), lr=1e-2))


def train(model, optimizer, step: int) -> None:
    torch.manual_seed(100 * step + dist.get_rank())
    optimizer.backward(model(torch.randn(SAMPLES, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


class Remembering(torch.optim.Optimizer):
    """A user's optimizer, whose state nobody can foretell."""

    def __init__(self, parameters, *, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    for age in range(4):
                        memory = state.setdefault(f"memory {age}", torch.zeros_like(parameter))
                        memory.mul_(age / 4).add_(parameter.grad)
                        parameter.sub_(memory, alpha=group["lr"])


def refused_until_it_trains(make, *, num_steps: int, limits: dict[str, int]) -> list[str]:
    """Do what refusals say; a refused step must leave what the steps before it have made."""
    refusals: list[str] = []
    pair = build(make)
    expected = [parameters(pair[0])]
    for step in range(num_steps):
        train(*pair, step)
        expected.append(parameters(pair[0]))
    while len(refusals) < 6:
        where, done, model = "shard", 0, None
        try:
            model, optimizer = build(make, sw.Budget(**limits))
            for done in range(num_steps):
                where = f"step {done}"
                train(model, optimizer, done)
        except sw.BudgetError as error:
            refusals.append(where)
            if model is not None:
                assert_bit_equal(parameters(model), expected[done])
            tier = next(name for name in limits if f"Budget.{name} to" in str(error))
            limits[tier] = asked_bytes(error, tier)
        else:
            assert_bit_equal(parameters(model), expected[-1])
            host = tiers_of(model).host
            assert host.peak_bytes <= limits["host"]
            return refusals
    raise AssertionError(f"refused for ever: {refusals}")


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Muon, torch.optim.AdamW])
def test_no_update_is_refused_when_it_has_begun(make) -> None:
    """Adafactor keeps another state for vectors than for matrices; both are foretold."""
    limits = {"host": 1, "accelerator": 4 * CHUNK_BYTES}
    if make is torch.optim.Muon:
        make = muon_of_matrices
    refusals = refused_until_it_trains(make, num_steps=3, limits=limits)
    assert set(refusals) <= {"shard", "step 0"}


def muon_of_matrices(trained, *, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in trained if p.ndim == 2], lr=lr)


@pytest.mark.world_size(1, 2)
def test_state_that_nobody_could_foretell_is_refused_before_the_next_update() -> None:
    limits = {"host": 1, "accelerator": 4 * CHUNK_BYTES}
    refusals = refused_until_it_trains(Remembering, num_steps=3, limits=limits)
    assert refusals[-1] == "step 1"
