"""The oracle is plain PyTorch on one rank, and the joined batch on more."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.kit.models import CASES
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_one_rank_is_plain_pytorch_to_the_bit(name, num_micro_batches):
    case = CASES[name]
    options = OracleOptions(world_size=1, num_micro_batches=num_micro_batches, clip_grad_norm=0.1)
    records = run_oracle(case.build, _adamw, case.loss, options)

    torch.manual_seed(0)
    model = case.build()
    optimizer = _adamw(model)
    for step, record in enumerate(records):
        for micro_batch in range(num_micro_batches):
            seed(step=step, rank=0, micro_batch=micro_batch)
            loss = case.loss(model)
            assert loss.item() == record.losses[0][micro_batch]
            loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() == record.grad_norm
        optimizer.step()
        optimizer.zero_grad()
        assert_bit_equal(dict(model.named_parameters()), record.parameters)
        assert_bit_equal(dict(model.named_buffers()), record.buffers[0])


def _rank_loss(model, reduction="mean"):
    return nn.functional.mse_loss(model(torch.randn(2, 5)), torch.zeros(2, 3), reduction=reduction)


def _joined_gradient(world_size, num_micro_batches=1):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    inputs = []
    for rank in range(world_size):
        for micro_batch in range(num_micro_batches):
            seed(step=0, rank=rank, micro_batch=micro_batch)
            inputs.append(torch.randn(2, 5))
    joined = torch.cat(inputs)
    nn.functional.mse_loss(model(joined), torch.zeros(len(joined), 3)).backward()
    return model.weight.grad


def _oracle_gradient(loss=_rank_loss, **options):
    [record] = run_oracle(
        partial(nn.Linear, 5, 3), _sgd, loss, OracleOptions(num_steps=1, **options)
    )
    return record.gradients["weight"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_mean_over_ranks_is_that_of_the_joined_batch(world_size):
    torch.testing.assert_close(
        _oracle_gradient(world_size=world_size), _joined_gradient(world_size)
    )


def test_the_sum_over_ranks_is_the_mean_times_their_number():
    total = _oracle_gradient(world_size=3, gradient_reduction="sum")
    torch.testing.assert_close(total, 3 * _joined_gradient(3))


@pytest.mark.parametrize("accumulate", ["reduced", "local"])
def test_micro_batches_add_up_whichever_comes_first(accumulate):
    total = _oracle_gradient(world_size=2, num_micro_batches=3, accumulate=accumulate)
    torch.testing.assert_close(total, 3 * _joined_gradient(2, 3))


def test_weights_make_the_mean_of_the_joined_batch_from_sums():
    total = _oracle_gradient(
        partial(_rank_loss, reduction="sum"),
        world_size=2,
        num_micro_batches=2,
        weight=lambda step, rank, micro_batch: 6.0,
    )
    torch.testing.assert_close(total, _joined_gradient(2, 2))


def test_16_bit_ranks_have_masters_that_small_updates_reach():
    options = OracleOptions(
        world_size=2, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, num_steps=2
    )
    case = CASES["conv"]
    before, after = run_oracle(case.build, partial(_sgd, lr=1e-6), case.loss, options)
    assert after.gradients["conv.weight"].dtype == torch.float32
    assert not torch.equal(before.parameters["conv.weight"], after.parameters["conv.weight"])
    assert after.buffers[0]["norm.running_mean"].dtype == torch.float32


def test_a_parameter_that_no_rank_used_has_no_gradient():
    case = CASES["mlp"]
    [record] = run_oracle(case.build, _sgd, case.loss, OracleOptions(world_size=2, num_steps=1))
    assert [name for name, g in record.gradients.items() if g is None] == [
        "unused.weight",
        "unused.bias",
    ]


def test_bit_equal_accepts_nan_and_signed_zero():
    assert_bit_equal(
        {"a": torch.tensor([0.0, float("nan")]), "b": None},
        {"a": torch.tensor([-0.0, float("nan")]), "b": None},
    )


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({"w": torch.zeros(2, 2)}, {"w": torch.tensor([[0.0, 0.0], [0.5, 1.0]])}, "2 of 4 values"),
        ({"w": torch.zeros(1)}, {"w": torch.full((1,), 1e-45)}, r"first at \(0,\): 0.0"),
        ({"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}, r"max abs 1.000e\+00"),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2, 1)}, r"is \(2,\) .*, expected \(2, 1\)"),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2).double()}, "expected .* torch.float64"),
        ({"w": torch.zeros(2)}, {"w": None}, "expected None"),
        ({}, {"w": torch.zeros(2)}, "w: missing"),
        ({"w": torch.zeros(2)}, {}, "w: not expected"),
    ],
)
def test_bit_equal_says_what_differs(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_bit_equal(actual, expected)
