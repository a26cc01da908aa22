"""Whatever the stage and the dtypes, ranks together train like one process, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat.colossalai import LowLevelZeroOptimizer
from tests.distributed.compat.kit import adam, backward, build, gradients, loss_of, sgd, values
from tests.kit.models import OddMLP
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle

NUM_STEPS = 2
HALF = (torch.float16, torch.bfloat16)


def rounded_mlp(dtype: torch.dtype, *, stays: bool) -> nn.Module:
    """The model after it was cast, seen in float32 unless it stays in the dtype."""
    model = OddMLP().to(dtype)
    return model if stays else model.float()


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("partition_grad", [False, True])
def test_float32_parameters_equal_those_of_one_process(world_size: int, partition_grad: bool):
    for make_optimizer in (adam, sgd):
        records = run_oracle(
            OddMLP,
            make_optimizer,
            loss_of,
            OracleOptions(world_size=world_size, num_steps=NUM_STEPS),
        )
        model, optimizer = build(make_optimizer, partition_grad=partition_grad)
        before = values(model)
        for step, record in enumerate(records):
            loss = backward(model, optimizer, step=step)
            assert loss.item() == record.losses[dist.get_rank()][0]
            assert all(p.grad is None for p in model.parameters())
            assert_bit_equal(gradients(model, optimizer), record.gradients)
            optimizer.step()
            assert_bit_equal(values(model), record.parameters)
            assert optimizer.get_grad_norm() == pytest.approx(record.grad_norm, rel=1e-6)
        unused = model.get_parameter("unused.weight")
        assert torch.equal(unused, before["unused.weight"])
        assert not torch.equal(model.get_parameter("last.weight"), before["last.weight"])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_parameters_equal_those_of_one_process(
    world_size: int, dtype: torch.dtype, master_weights: bool
):
    """At a loss scale of one no bit may differ; without masters 16 bits are updated."""
    records = run_oracle(
        lambda: rounded_mlp(dtype, stays=not master_weights),
        sgd,
        loss_of,
        OracleOptions(
            world_size=world_size,
            num_steps=NUM_STEPS,
            param_dtype=dtype if master_weights else None,
        ),
    )
    for partition_grad in (False, True):
        model, optimizer = build(
            sgd,
            initial_scale=1.0,
            partition_grad=partition_grad,
            forced_dtype=dtype,
            master_weights=master_weights,
        )
        assert {p.dtype for p in model.parameters()} == {optimizer.dtype} == {dtype}
        for step, record in enumerate(records):
            backward(model, optimizer, step=step)
            optimizer.step()
            expected = {name: p.to(dtype) for name, p in record.parameters.items()}
            assert_bit_equal(values(model), expected, what=f"step {step}")
        masters = optimizer.state_dict().get("shardwise", {}).get("masters", {})
        assert len(masters) == (len(list(model.parameters())) if master_weights else 0)
        names = [name for name, _ in model.named_parameters()]
        for index, master in masters.items():
            assert torch.equal(master, records[-1].parameters[names[index]])


@pytest.mark.world_size(2)
def test_the_loss_scale_does_not_show_in_the_update(world_size: int):
    """A true gradient of 1e-8 is nothing in float16; scaled it survives to a float32 update.

    Dividing by the scale in 16 bits, before the cast, would lose it again.
    """
    for partition_grad in (False, True):
        model = nn.Linear(5, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        zero = LowLevelZeroOptimizer(
            optimizer, partition_grad=partition_grad, forced_dtype=torch.float16
        )
        x = torch.ones(1, 5, dtype=torch.float16)
        zero.backward(model(x).float().sum() * 1e-8)
        zero.step()
        master = zero.state_dict()["shardwise"]["masters"][0]
        assert master.dtype is torch.float32
        torch.testing.assert_close(master, torch.full((1, 5), -1e-8), rtol=1e-3, atol=0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("local", [False, True], ids=["synchronised", "no_sync"])
@pytest.mark.parametrize("partition_grad", [False, True])
def test_micro_batches_and_clipping_equal_one_process(
    world_size: int, partition_grad: bool, local: bool
):
    """Unclipped to the bit; clipped up to the rounding of the coefficient."""
    for clip in (0.0, 0.01):
        options = OracleOptions(
            world_size=world_size,
            num_steps=1,
            num_micro_batches=2,
            accumulate="local" if local else "reduced",
            clip_grad_norm=clip or None,
        )
        (record,) = run_oracle(OddMLP, adam, loss_of, options)
        model, optimizer = build(adam, partition_grad=partition_grad, clip_grad_norm=clip)
        backward(model, optimizer, micro_batch=0, local=local)
        backward(model, optimizer, micro_batch=1)
        assert_bit_equal(gradients(model, optimizer), record.gradients)
        optimizer.step()
        if clip:
            assert record.grad_norm > 2 * clip
            assert optimizer.get_grad_norm() == pytest.approx(record.grad_norm, rel=1e-6)
            for name, value in values(model).items():
                torch.testing.assert_close(value, record.parameters[name], rtol=1e-5, atol=1e-6)
        else:
            assert_bit_equal(values(model), record.parameters)
