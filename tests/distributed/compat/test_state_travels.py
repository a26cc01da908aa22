"""State: in and out of plain optimizers, over other numbers of ranks, in parts, and exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.compat.colossalai import LowLevelZeroOptimizer
from shardwise.errors import ConfigurationError
from tests.distributed.compat.kit import backward, build, loss_of, values
from tests.kit.models import OddMLP
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed

STAGES = pytest.mark.parametrize("partition_grad", [False, True], ids=["stage1", "stage2"])
SCALE = {"initial_scale": 2.0**10, "growth_interval": 2}


def unequal_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Adam over a group of one parameter, one of four and one of one."""
    parameters = list(model.parameters())
    return torch.optim.Adam(
        [
            {"params": parameters[:1], "lr": 0.1},
            {"params": parameters[1:5], "weight_decay": 0.5},
            {"params": parameters[5:]},
        ]
    )


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare `state` entry by entry and groups as they are."""
    assert actual["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        assert_bit_equal(actual["state"][index], entry, what=f"state {index}")
    assert actual["param_groups"] == expected["param_groups"]


@pytest.mark.world_size(2, 3)
@STAGES
def test_the_state_is_that_of_a_plain_optimizer_and_loads_into_one(
    world_size: int, partition_grad: bool
):
    plain: list[torch.optim.Optimizer] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        plain.append(unequal_groups(model))
        return plain[-1]

    run_oracle(OddMLP, make, loss_of, OracleOptions(world_size=world_size, num_steps=2))
    model, optimizer = build(unequal_groups, partition_grad=partition_grad)
    for step in range(2):
        backward(model, optimizer, step=step)
        optimizer.step()
    state, expected = optimizer.state_dict(), plain[0].state_dict()
    assert_same_state(state, expected)
    assert all(v.device.type == "cpu" for e in state["state"].values() for v in e.values())
    fresh = unequal_groups(OddMLP())
    fresh.load_state_dict(state)
    assert_same_state(fresh.state_dict(), expected)
    # and back: a plain state is cut and gathered again
    other_model, other = build(unequal_groups, partition_grad=partition_grad)
    other.load_state_dict(copy.deepcopy(expected))
    assert_same_state(other.state_dict(), expected)
    assert other.param_groups[0]["lr"] == 0.1
    del other_model


@pytest.mark.world_size(4)
@STAGES
def test_a_state_saved_at_four_ranks_continues_at_two_to_the_bit(partition_grad: bool):
    """Masters and a scale that grew travel along, so nothing restarts from rounded values."""
    model, optimizer = build(
        unequal_groups, forced_dtype=torch.float16, partition_grad=partition_grad, **SCALE
    )
    for step in range(3):
        backward(model, optimizer, step=step)
        optimizer.step()
    saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    assert optimizer.loss_scale == 2.0**11
    results: list[dict[str, Tensor]] = []
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (None, halves[dist.get_rank() // 2]):
        torch.manual_seed(1)
        other = OddMLP()
        zero = LowLevelZeroOptimizer(
            unequal_groups(other), forced_dtype=torch.float16, dp_process_group=group,
            partition_grad=partition_grad, **SCALE,
        )  # fmt: skip
        other.load_state_dict(weights)
        zero.update_master_params(other)
        zero.load_state_dict(saved)
        assert zero.loss_scale == 2.0**11
        for number in range(2):
            seed(step=9, rank=0, micro_batch=number)
            zero.backward(loss_of(other))
            zero.step()
        # equal inputs everywhere: the mean over two or four equal gradients is the gradient
        results.append(zero.state_dict()["shardwise"]["masters"])
        assert zero.loss_scale == 2.0**12
    assert_bit_equal(results[1], results[0])
    for step in range(2):
        seed(step=9, rank=0, micro_batch=step)
        optimizer.backward(loss_of(model))
        optimizer.step()
    assert_bit_equal(optimizer.state_dict()["shardwise"]["masters"], results[0])


@pytest.mark.world_size(2)
@STAGES
def test_parts_of_the_state_add_up_and_keep_their_limit_in_mebibytes(partition_grad: bool):
    """Groups of one, four and one parameter; a limit that counts elements makes too many parts."""
    model, optimizer = build(unequal_groups, partition_grad=partition_grad)
    assert list(optimizer.state_dict_shard()) == []
    backward(model, optimizer)
    optimizer.step()
    expected = optimizer.state_dict()["state"]
    sizes = {i: sum(v.numel() * v.element_size() for v in e.values()) for i, e in expected.items()}
    limits = (1024, max(sizes.values()) / 2**20, (sum(sizes.values()) - 1) / 2**20, 1e-4)
    for limit, num_parts in zip(limits, (1, None, 2, None), strict=True):
        union: dict[int, Any] = {}
        parts = list(optimizer.state_dict_shard(max_shard_size=limit))
        assert num_parts in (None, len(parts))
        for part, num_bytes in parts:
            assert num_bytes == sum(sizes[index] for index in part)
            assert num_bytes <= limit * 2**20 or len(part) == 1
            assert union.keys().isdisjoint(part)
            union.update(part)
        assert union.keys() == expected.keys()
        for index, entry in expected.items():
            assert_bit_equal(union[index], entry)


@pytest.mark.world_size(2)
@STAGES
def test_frozen_parameters_keep_their_place_and_may_train_later(partition_grad: bool):
    """Leaving them out of the groups would shift every index after them."""
    torch.manual_seed(0)
    model = OddMLP()
    model.first.requires_grad_(False)
    optimizer = LowLevelZeroOptimizer(unequal_groups(model), partition_grad=partition_grad)
    backward(model, optimizer)
    optimizer.step()
    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0], [1, 2, 3, 4], [5]]
    assert sorted(state["state"]) == [4, 5]
    unequal_groups(OddMLP()).load_state_dict(state)
    before = values(model)
    model.first.requires_grad_(True)
    backward(model, optimizer, step=1)
    optimizer.step()
    assert not torch.equal(model.first.weight, before["first.weight"])
    assert sorted(optimizer.state_dict()["state"]) == [0, 1, 4, 5]
    gathered = model.first.weight.detach().clone()
    dist.broadcast(gathered, 0)
    assert torch.equal(gathered, model.first.weight)


@pytest.mark.world_size(2)
@STAGES
def test_a_group_without_any_gradient_is_left_alone(partition_grad: bool):
    """All of a group frozen, or all its gradients dropped by an overflow: no lookup may fail."""
    torch.manual_seed(0)
    model = OddMLP()
    model.first.requires_grad_(False)
    groups = [{"params": part.parameters()} for part in (model.first, model.unused, model.last)]
    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(groups, lr=1.0), partition_grad=partition_grad, clip_grad_norm=1.0
    )
    before = values(model)
    optimizer.step()
    assert_bit_equal(values(model), before)
    backward(model, optimizer)
    optimizer.step()
    after = values(model)
    for name in before:
        assert torch.equal(after[name], before[name]) is not name.startswith("last"), name


@pytest.mark.world_size(2)
@STAGES
def test_masters_follow_weights_that_were_loaded(partition_grad: bool):
    """Otherwise the next step would write the old weights back; also behind autograd's back."""
    model, optimizer = build(
        unequal_groups, forced_dtype=torch.bfloat16, partition_grad=partition_grad
    )
    backward(model, optimizer)
    optimizer.step()
    untouched = optimizer.state_dict()["shardwise"]["masters"]
    torch.manual_seed(7)
    other = OddMLP()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs)
    optimizer.update_master_params(model.first)
    masters = optimizer.state_dict()["shardwise"]["masters"]
    for index, (name, parameter) in enumerate(model.named_parameters()):
        expected = parameter.float() if name.startswith("first") else untouched[index]
        assert torch.equal(masters[index], expected), name
    optimizer.update_master_params(model)
    masters = optimizer.state_dict()["shardwise"]["masters"]
    for index, parameter in enumerate(model.parameters()):
        assert torch.equal(masters[index], parameter.float())
    pieces = optimizer.get_working_to_master_map()
    owned = torch.cat([pieces[id(p)].reshape(-1) for p in model.parameters()])
    assert owned.dtype is torch.float32
    assert torch.equal(owned, owned.bfloat16().float())


@pytest.mark.world_size(1, 2, 3)
def test_working_and_master_maps_are_inverse_and_cover_trainable_parameters(world_size: int):
    for dtype in (None, torch.bfloat16):
        model, optimizer = build(unequal_groups, forced_dtype=dtype)
        model.get_parameter("unused.bias").requires_grad_(False)
        masters, workings = (
            optimizer.get_working_to_master_map(),
            optimizer.get_master_to_working_map(),
        )
        trainable = [p for p in model.parameters() if p.requires_grad]
        assert list(masters) == [id(p) for p in trainable]
        assert [workings[id(masters[id(p)])] for p in trainable] == trainable
        assert len(workings) == len(masters)
        again = optimizer.get_working_to_master_map()
        assert all(again[key] is master for key, master in masters.items())
        for parameter in trainable:
            numel = torch.tensor(masters[id(parameter)].numel())
            dist.all_reduce(numel)
            assert numel == parameter.numel()


@pytest.mark.world_size(2, 3)
def test_masters_share_memory_by_dtype_alone(world_size: int):
    """Never by whether a size divides by the number of ranks: float32 always, 16 bits never."""
    for dtype, shares in ((torch.float32, True), (torch.bfloat16, False)):
        for numel in (180, 181):
            weight = nn.Parameter(torch.ones(numel, dtype=dtype))
            optimizer = LowLevelZeroOptimizer(torch.optim.SGD([weight], lr=1.0))
            (master,) = optimizer.get_working_to_master_map().values()
            one = master.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            assert one is shares, (dtype, numel)


@pytest.mark.world_size(2)
@STAGES
def test_a_group_that_is_added_is_cast_and_sharded(partition_grad: bool):
    """Passing it to the inner optimizer as it is would leave it whole and unreduced."""
    torch.manual_seed(dist.get_rank())
    first, later = nn.Linear(5, 3), nn.Linear(5, 2)
    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(first.parameters(), lr=1.0),
        forced_dtype=torch.bfloat16,
        partition_grad=partition_grad,
    )
    with pytest.raises(ConfigurationError):
        optimizer.add_param_group({"params": [*later.parameters(), first.weight]})
    assert later.weight.dtype is torch.float32
    optimizer.add_param_group({"params": later.parameters(), "lr": 0.5})
    assert optimizer.num_param_groups == 2
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert optimizer.unwrap().param_groups is optimizer.param_groups
    assert {p.dtype for p in later.parameters()} == {torch.bfloat16}
    start = later.weight.detach().float()
    x = torch.full((1, 5), 1.0 + dist.get_rank()).bfloat16()
    optimizer.backward((first(x).sum() + later(x).sum()).float())
    assert later.weight.grad is None
    optimizer.step()
    masters = optimizer.state_dict()["shardwise"]["masters"]
    assert torch.equal(masters[2], start - 0.5 * 1.5)
    owned = torch.tensor(sum(t.numel() for t in optimizer.parameters))
    assert owned < 18 + 12
    dist.all_reduce(owned)
    assert owned == 18 + 12


@pytest.mark.world_size(2)
def test_schedulers_made_before_and_after_drive_the_groups():
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    optimizer = LowLevelZeroOptimizer(inner)
    late = torch.optim.lr_scheduler.StepLR(optimizer.unwrap(), step_size=1, gamma=0.5)
    assert optimizer.optim is inner
    assert optimizer.defaults["lr"] == 1.0
    start = model.bias.detach().clone()
    optimizer.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    early.step()
    late.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    assert torch.equal(model.bias, start - 1.0 - 0.25)


def test_nothing_is_left_of_a_refused_cast():
    """A constructor that fails after casting the parameters must give them back as they were."""
    weight = nn.Parameter(torch.ones(4))
    data = weight.data_ptr()
    optimizer = torch.optim.LBFGS([weight])
    with pytest.raises(ConfigurationError):
        LowLevelZeroOptimizer(optimizer, forced_dtype=torch.float16)
    assert weight.dtype is torch.float32
    assert weight.data_ptr() == data
