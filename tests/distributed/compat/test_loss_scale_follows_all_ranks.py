"""float16 steps: an overflow anywhere skips everywhere, and the scale moves as it is documented."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from shardwise.compat.colossalai import LowLevelZeroOptimizer
from tests.distributed.compat.kit import adam, backward, build, gradients, values
from tests.kit.oracle import assert_bit_equal

if TYPE_CHECKING:
    from collections.abc import Callable

STAGES = pytest.mark.parametrize("partition_grad", [False, True], ids=["stage1", "stage2"])
TRACE = [
    *zip(
        "xx.x...x.xx....",
        (16, 8, 8, 4, 4, 4, 8, 8, 8, 4, 2, 2, 2, 4, 4),
        strict=True,
    )
]
"""What happens at a step (x overflows) and the scale after it."""


def one_weight(**arguments: object) -> tuple[torch.nn.Parameter, LowLevelZeroOptimizer]:
    """A float16 weight of five elements under SGD."""
    weight = torch.nn.Parameter(torch.ones(5, dtype=torch.float16))
    return weight, LowLevelZeroOptimizer(torch.optim.SGD([weight], lr=1.0), **arguments)


@pytest.mark.world_size(2)
@STAGES
def test_the_scale_follows_the_documented_trace(partition_grad: bool):
    """Overflows come on one rank only, by turns; every rank must see the same scale."""
    weight, optimizer = one_weight(
        initial_scale=16, growth_interval=3, hysteresis=2, min_scale=1, max_scale=64,
        partition_grad=partition_grad,
    )  # fmt: skip
    for number, (event, expected) in enumerate(TRACE):
        before = weight.detach().clone()
        is_mine = event == "x" and number % 2 == dist.get_rank()
        optimizer.backward((weight * (float("inf") if is_mine else 2.0**-6)).float().sum())
        optimizer.step()
        assert optimizer.loss_scale == expected, number
        assert torch.equal(weight, before) is (event == "x"), number


@pytest.mark.world_size(2)
@STAGES
def test_a_step_that_grows_the_scale_divides_by_that_of_its_gradients(partition_grad: bool):
    """Reading the factor after the scaler was updated applies half the gradient at growths."""
    weight, optimizer = one_weight(
        initial_scale=16, growth_interval=1, partition_grad=partition_grad, clip_grad_norm=100.0
    )
    for number in range(1, 4):
        optimizer.backward((weight * 0.125).float().sum())
        optimizer.step()
        assert optimizer.loss_scale == 16 * 2**number
        assert torch.equal(weight, torch.full_like(weight, 1 - 0.125 * number))
        assert optimizer.get_grad_norm() == pytest.approx(0.125 * 5**0.5)


@pytest.mark.world_size(3)
@STAGES
def test_an_overflow_on_one_rank_changes_no_bit_on_any(
    partition_grad: bool,
):
    """Parameters, masters and optimizer state stay; the gradients are gone."""
    model, optimizer = build(
        adam, forced_dtype=torch.float16, initial_scale=2.0**10, partition_grad=partition_grad
    )
    backward(model, optimizer)
    optimizer.step()
    before, state = values(model), optimizer.state_dict()
    model.get_parameter("last.bias").register_hook(
        lambda grad: grad * (float("inf") if dist.get_rank() == 1 else 1.0)
    )
    backward(model, optimizer, step=1)
    optimizer.step()
    assert_bit_equal(values(model), before)
    after = optimizer.state_dict()
    assert after["state"].keys() == state["state"].keys()
    for index, entry in state["state"].items():
        assert_bit_equal(after["state"][index], entry)
    masters = state["shardwise"]["masters"]
    assert_bit_equal(after["shardwise"]["masters"], masters)
    assert all(g is None for g in gradients(model, optimizer).values())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.world_size(2)
def test_a_bad_batch_in_any_dtype_does_not_reach_the_parameters():
    """Clipping by an infinite norm would multiply it by zero and write NaN into every master."""
    for dtype in (torch.bfloat16, torch.float32):
        for value in (float("inf"), float("nan")):
            weight = torch.nn.Parameter(torch.ones(5, dtype=dtype))
            optimizer = LowLevelZeroOptimizer(torch.optim.SGD([weight], lr=1.0), clip_grad_norm=1.0)
            slope = torch.tensor([1.0, value] if dist.get_rank() else [1.0, 1.0])
            optimizer.backward((weight[:2] * slope).sum())
            optimizer.step()
            assert torch.equal(weight, torch.ones_like(weight)), (dtype, value)
            assert optimizer.loss_scale == 1.0


@pytest.mark.world_size(2)
def test_a_skipped_step_is_logged_and_no_other():
    weight, optimizer = one_weight(initial_scale=4.0, verbose=True)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("shardwise.compat")
    logger.addHandler(handler)
    take_step(optimizer, lambda: (weight * 0.5).float().sum())
    assert not records
    take_step(optimizer, lambda: (weight * float("inf")).float().sum())
    logger.removeHandler(handler)
    assert ["overflow" in record.getMessage() for record in records] == [True]


def take_step(optimizer: LowLevelZeroOptimizer, loss: Callable[[], torch.Tensor]) -> None:
    """Backward and step."""
    optimizer.backward(loss())
    optimizer.step()
