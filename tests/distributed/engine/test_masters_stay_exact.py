"""A master is replaced only where the working value was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw

BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)


def trained(seed: int = 0):
    torch.manual_seed(seed)
    model = sw.shard(nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5)), stage=2, mixed_precision=BF16)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer) -> None:
    optimizer.backward(model(torch.ones(2, 9)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def masters(optimizer) -> dict[int, torch.Tensor]:
    return optimizer.state_dict()["shardwise"]["masters"]


def assert_same(one, other) -> None:
    assert one.keys() == other.keys()
    for index, value in one.items():
        assert torch.equal(value, other[index]), index


@pytest.mark.world_size(1, 2)
def test_reading_and_writing_back_nothing_changes_no_master() -> None:
    model, optimizer = trained()
    before = masters(optimizer)
    with sw.full_parameters(model[0], writeback=True):
        pass
    assert_same(masters(optimizer), before)
    with sw.full_parameters(model, writeback=True), torch.no_grad():
        model[0].bias.zero_()
    after = masters(optimizer)
    assert torch.equal(after[1], torch.zeros(7))
    assert_same(
        {k: v for k, v in after.items() if k != 1}, {k: v for k, v in before.items() if k != 1}
    )


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_run_continues_exactly_whichever_state_is_loaded_first(order: str) -> None:
    model, optimizer = trained()
    weights, state = model.state_dict(), optimizer.state_dict()
    weights = {k: v.clone() for k, v in weights.items()}
    other, second = trained(seed=1)
    loads = [lambda: other.load_state_dict(weights), lambda: second.load_state_dict(state)]
    for load in loads if order == "model first" else reversed(loads):
        load()
    step(model, optimizer)
    step(other, second)
    assert_same(masters(second), masters(optimizer))


@pytest.mark.world_size(2)
def test_weights_loaded_alone_reach_the_master() -> None:
    model, _ = trained()
    other, second = trained(seed=1)
    other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    second.param_groups[0]["lr"] = 0.0
    step(other, second)
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.world_size(2)
def test_a_parameter_unfrozen_before_loading_gets_its_exact_master() -> None:
    model, optimizer = trained()
    weights, state = model.state_dict(), optimizer.state_dict()
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5))
    other[0].requires_grad_(False)
    sw.shard(other, stage=2, mixed_precision=BF16)
    second = sw.ShardedOptimizer(torch.optim.AdamW(other.parameters(), lr=1e-2))
    other[0].requires_grad_(True)
    second.load_state_dict(state)
    other.load_state_dict({k: v.clone() for k, v in weights.items()})
    assert_same(masters(second), masters(optimizer))


@pytest.mark.world_size(2)
def test_a_repack_after_training_is_refused_on_all_ranks() -> None:
    model = sw.shard(nn.Sequential(nn.Linear(8, 8, False), nn.Linear(8, 8, False)), stage=2)
    first = sw.ShardedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
    second = sw.ShardedOptimizer(torch.optim.Muon(model[1].parameters(), lr=0.1))
    for _ in range(2):
        first.backward(model(torch.ones(1, 8)).sum())
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    with pytest.raises(sw.ShardwiseError, match="before the first backward"):
        sw.ShardedOptimizer(torch.optim.Muon(model[0].parameters(), lr=0.1))
