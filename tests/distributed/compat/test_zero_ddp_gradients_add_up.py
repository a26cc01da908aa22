"""Several backward passes before a step, from losses or from gradients of outputs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.compat.colossalai import ZeroDDP
from tests.distributed.compat.zero_ddp_kit import MODES, adamw, build, exact, gradients, is_at_rest
from tests.kit.models import CASES
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed


@pytest.mark.world_size(1, 2)
def test_micro_batches_train_like_one_process(world_size: int) -> None:
    """A second forward pass computes with the weights, not with the gradients of the first."""
    case = CASES["gpt"]
    options = OracleOptions(
        world_size=world_size, num_steps=2, num_micro_batches=3, param_dtype=torch.bfloat16
    )
    records = run_oracle(case.build, adamw, case.loss, options)
    for mode in MODES:
        model, optimizer = build(case.build, mixed_precision=torch.bfloat16, **mode)
        for step, record in enumerate(records):
            for micro_batch in range(3):
                seed(step=step, rank=dist.get_rank(), micro_batch=micro_batch)
                loss = case.loss(model)
                assert loss.item() == record.losses[dist.get_rank()][micro_batch]
                if micro_batch == 1:
                    model.backward(loss)
                else:
                    optimizer.backward(loss)
            assert_bit_equal(gradients(model), record.gradients)
            optimizer.step()
            assert_bit_equal(exact(model), record.parameters)
            model.zero_grad(set_to_none=True)


@pytest.mark.world_size(1, 2)
def test_a_gradient_of_the_output_gives_what_its_loss_gives() -> None:
    case = CASES["mlp"]
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        model = ZeroDDP(case.build(), mixed_precision=dtype, force_outputs_fp32=True)
        for num_passes in (1, 2):
            for _ in range(num_passes):
                model.backward(model(torch.ones(4, 123)).square().sum() / 8)
            expected = gradients(model)
            model.zero_grad(set_to_none=True)
            for _ in range(num_passes):
                output = model(torch.ones(4, 123))
                model.backward_by_grad(output, output.detach() / 4)
                assert is_at_rest(model)
            assert_bit_equal(gradients(model), expected)
            model.zero_grad(set_to_none=True)


@pytest.mark.world_size(1, 2)
def test_sums_begin_anew_after_zero_grad() -> None:
    """By the module or by the optimizer, with gradients of None or of zero."""
    model = ZeroDDP(nn.Linear(3, 2), mixed_precision=torch.float32)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    bias = model.module.get_parameter("bias")
    mean = (dist.get_world_size() + 1) / 2
    for clear in (model.zero_grad, optimizer.zero_grad):
        for set_to_none in (False, True):
            for times in (1, 2, 3):
                model.backward(model(torch.ones(1, 3)).sum() * (1 + dist.get_rank()))
                gradient = sw.full_gradient(bias)
                assert gradient is not None
                assert torch.equal(gradient, torch.full((2,), mean * times))
            clear(set_to_none=set_to_none)
            gradient = sw.full_gradient(bias)
            assert gradient is None if set_to_none else not gradient.any()


@pytest.mark.world_size(2)
def test_gradients_wait_on_their_rank_under_no_sync() -> None:
    model = ZeroDDP(nn.Linear(3, 2), mixed_precision=torch.float32)
    with sw.no_sync(model):
        model.backward(model(torch.ones(1, 3)).sum() * (1 + dist.get_rank()))
    bias = model.module.get_parameter("bias")
    assert torch.equal(bias.grad, torch.full((2,), 1.0 + dist.get_rank()))
    model.backward(model(torch.ones(1, 3)).sum())
    gradient = sw.full_gradient(bias)
    assert gradient is not None
    assert torch.equal(gradient, torch.full((2,), 2.5))
