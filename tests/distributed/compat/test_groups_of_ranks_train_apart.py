"""Process groups that are parts of the world, alone and with copies inside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat.colossalai import ColoDDP, LowLevelZeroOptimizer
from shardwise.errors import ConfigurationError
from tests.distributed.compat.kit import adam, backward, build, gradients, loss_of, values
from tests.kit.models import OddMLP
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle

STAGES = pytest.mark.parametrize("partition_grad", [False, True], ids=["stage1", "stage2"])


def half_of_the_world() -> dist.ProcessGroup:
    """Return this rank's half: the first, or the second."""
    size = dist.get_world_size() // 2
    halves = [dist.new_group(list(range(start, start + size))) for start in (0, size)]
    group = halves[dist.get_rank() // size]
    assert isinstance(group, dist.ProcessGroup)
    return group


@pytest.mark.world_size(4)
@STAGES
def test_disjoint_groups_step_at_their_own_pace(partition_grad: bool):
    """An overflow flag that is reduced over the world hangs groups that step at different times."""
    group = half_of_the_world()
    number = dist.get_rank() // 2
    torch.manual_seed(number)
    model = nn.Linear(7, 3 + number).half()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        dp_process_group=group,
        partition_grad=partition_grad,
        initial_scale=4.0,
    )
    assert_bit_equal(values(model), start)
    for _ in range(1 + 3 * number):
        optimizer.backward(model(torch.ones(1, 7).half()).float().sum() * (1 + dist.get_rank()))
        optimizer.step()
    # the slope is the mean of (1 + rank) over the group, the same for every element
    slope = (1 + 2) / 2 if number == 0 else (3 + 4) / 2
    masters = optimizer.state_dict()["shardwise"]["masters"]
    for master, value in zip(masters.values(), start.values(), strict=True):
        expected = value.float()
        for _ in range(1 + 3 * number):
            expected = expected - 0.5 * slope
        assert torch.equal(master, expected)


@pytest.mark.world_size(4)
@STAGES
def test_copies_of_the_sharded_state_change_no_state(world_size: int, partition_grad: bool):
    """Shard inside runs of consecutive ranks, replicate across: the numbers of one big group."""
    (record,) = run_oracle(OddMLP, adam, loss_of, OracleOptions(world_size=world_size, num_steps=1))
    for copies in (1, 2, 4):
        model, optimizer = build(adam, sub_dp_size=copies, partition_grad=partition_grad)
        backward(model, optimizer)
        for name, gradient in gradients(model, optimizer).items():
            # runs are added first, then their sums: another order of additions
            torch.testing.assert_close(gradient, record.gradients[name], rtol=1e-5, atol=1e-8)
        optimizer.step()
        assert optimizer.get_grad_norm() == pytest.approx(record.grad_norm, rel=1e-5)
        owned = sum(t.numel() for t in optimizer.parameters)
        total = sum(p.numel() for p in model.parameters())
        assert abs(owned - total * copies / world_size) < 200
        state = optimizer.state_dict()["state"]
        assert sorted(state) == [0, 1, 4, 5]
        everywhere = [torch.empty_like(state[0]["exp_avg"]) for _ in range(world_size)]
        dist.all_gather(everywhere, state[0]["exp_avg"].contiguous())
        assert all(torch.equal(everywhere[0], other) for other in everywhere)


@pytest.mark.world_size(4)
def test_both_stages_agree_with_copies_too():
    results = []
    for partition_grad in (False, True):
        model, optimizer = build(
            adam, sub_dp_size=2, partition_grad=partition_grad, clip_grad_norm=0.01
        )
        for micro_batch in range(2):
            backward(model, optimizer, micro_batch=micro_batch)
        optimizer.step()
        results.append(values(model))
    assert_bit_equal(results[1], results[0])


@pytest.mark.world_size(4)
@STAGES
def test_copies_inside_a_part_of_the_world_need_nobody_outside(partition_grad: bool):
    """Ranks outside make no call at all: groups are created by their members alone."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() < 2:
        assert halves[1] is dist.GroupMember.NON_GROUP_MEMBER
        return
    group = halves[1]
    assert isinstance(group, dist.ProcessGroup)
    results: list[Any] = []
    for copies in (1, 2):
        model, optimizer = build(
            adam, dp_process_group=group, sub_dp_size=copies, partition_grad=partition_grad
        )
        backward(model, optimizer)
        optimizer.step()
        results.append(values(model))
    # two ranks: one addition, whichever axis it runs on
    assert_bit_equal(results[1], results[0])


@pytest.mark.world_size(4)
def test_groups_that_cannot_work_are_refused():
    group = half_of_the_world()
    outside = dist.new_group([0])
    refused: list[dict[str, Any]] = [
        {"sub_dp_size": 3},
        {"sub_dp_size": 0},
        {"dp_process_group": group, "sub_dp_size": 4},
    ]
    for arguments in refused:
        model = nn.Linear(3, 2)
        with pytest.raises(ConfigurationError, match="sub_dp_size"):
            LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **arguments)
        assert not hasattr(model.weight, "_shardwise")
    if dist.get_rank():
        model = nn.Linear(3, 2)
        with pytest.raises(ConfigurationError, match="process group"):
            LowLevelZeroOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), dp_process_group=outside
            )
        with pytest.raises(ConfigurationError, match="process group"):
            ColoDDP(model, process_group=outside)


@pytest.mark.world_size(4)
def test_data_parallel_modules_of_disjoint_groups_average_apart():
    group = half_of_the_world()
    model = ColoDDP(nn.Linear(2, 1, bias=False), process_group=group)
    model.backward(model(torch.full((1, 2), 1.0 + dist.get_rank())).sum())
    weight = model.module.get_parameter("weight")
    expected = 1.5 if dist.get_rank() < 2 else 3.5
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((1, 2), expected))
