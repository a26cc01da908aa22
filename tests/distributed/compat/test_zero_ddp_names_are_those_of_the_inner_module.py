"""`parameters`, `named_*`, modes and groups of ranks: the wrapper stands for the module inside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.compat.colossalai import ColoDDP, ZeroDDP
from shardwise.errors import ConfigurationError
from shardwise.shard import engine_of
from tests.distributed.compat.zero_ddp_kit import MODES, exact, is_at_rest
from tests.kit.models import CASES
from tests.kit.oracle import assert_bit_equal


@pytest.mark.world_size(1, 2)
def test_names_and_modes_are_those_of_the_inner_module(world_size: int) -> None:
    for mode in MODES:
        case = CASES["conv"]
        plain, inner = case.build(), case.build()
        model = ZeroDDP(inner, **mode)
        assert isinstance(model, ColoDDP)
        assert model.module is inner
        for named in ("named_parameters", "named_buffers", "named_modules", "named_children"):
            mine = [name for name, _ in getattr(model, named)()]
            assert mine == [name for name, _ in getattr(plain, named)()], named
        assert list(model.parameters()) == list(inner.parameters())
        assert [tuple(p.shape) for p in model.parameters()] == [
            tuple(p.shape) for p in plain.parameters()
        ]
        for is_training in (False, True):
            assert model.train(is_training) is model
            assert {part.training for part in (model, *inner.modules())} == {is_training}
        with sw.full_parameters(model):
            assert torch.isfinite(inner.conv.weight).all()
        with pytest.raises(ConfigurationError):
            ZeroDDP(inner)


@pytest.mark.world_size(2)
def test_every_rank_holds_a_slice_unless_all_is_to_be_whole() -> None:
    for mode, is_sharded in zip(MODES, (True, False, True), strict=True):
        model = ZeroDDP(CASES["mlp"].build(), **mode)
        total = sum(p.numel() for p in model.parameters())
        held = engine_of(model.module).tensors()
        numel = sum(tensor.numel() for tensor in held["parameters"])
        assert numel < 0.6 * total if is_sharded else numel >= total
        assert sum(tensor.numel() for tensor in held["masters"]) < 0.6 * total
        assert is_at_rest(model)


@pytest.mark.world_size(2)
def test_the_first_rank_decides_where_training_starts() -> None:
    """Seeds may differ over ranks: without a broadcast slices of two models would be stitched."""
    torch.manual_seed(dist.get_rank())
    inner = CASES["conv"].build()
    first = [inner.state_dict()]
    dist.broadcast_object_list(first)
    assert_bit_equal(ZeroDDP(inner).state_dict(only_rank_0=False), first[0])


@pytest.mark.world_size(4)
def test_ranks_of_a_group_train_apart_from_others() -> None:
    """Each group has a first rank of its own, and may do what the other does not."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    torch.manual_seed(half)
    model = ZeroDDP(nn.Linear(3, 2), process_group=halves[half], mixed_precision=torch.bfloat16)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    expected = exact(model)["bias"]
    for _ in range(1 + half):
        optimizer.backward(model(torch.ones(1, 3)).float().sum() * (1 + dist.get_rank()))
        gradient = sw.full_gradient(model.module.bias)
        assert gradient is not None
        assert torch.equal(gradient, torch.full((2,), 1.5 + 2 * half))
        optimizer.step()
        optimizer.zero_grad()
        expected = expected - (1.5 + 2 * half)
    assert_bit_equal({"bias": exact(model)["bias"]}, {"bias": expected})
    assert bool(model.state_dict()) is (dist.get_rank() % 2 == 0)
    other = halves[1 - half]
    with pytest.raises(ConfigurationError, match="process group"):
        ZeroDDP(nn.Linear(3, 2), process_group=other)
