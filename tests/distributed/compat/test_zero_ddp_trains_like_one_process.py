"""`ZeroDDP` and any optimizer in `ShardedOptimizer`: the numbers of one process, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.distributed.compat.zero_ddp_kit import (
    MODES,
    adamw,
    build,
    exact,
    gradients,
    is_at_rest,
)
from tests.kit.models import CASES
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed

NAMES = ("mlp", "gpt", "gpt-reentrant", "conv", "lstm", "odd-shapes")


def check(name: str, dtype: torch.dtype, **arguments: object) -> None:
    """Train three steps and compare losses, gradients, exact parameters and buffers."""
    case, rank = CASES[name], dist.get_rank()
    options = OracleOptions(world_size=dist.get_world_size(), param_dtype=dtype)
    records = run_oracle(case.build, adamw, case.loss, options)
    model, optimizer = build(case.build, mixed_precision=dtype, **arguments)
    for step, record in enumerate(records):
        what = f"{name}, {dtype}, {arguments}, step {step}"
        seed(step=step, rank=rank, micro_batch=0)
        loss = case.loss(model)
        assert loss.item() == record.losses[rank][0], what
        optimizer.backward(loss)
        assert is_at_rest(model) is ("reshard_after_forward" not in arguments), what
        assert_bit_equal(gradients(model), record.gradients, what=what)
        optimizer.step()
        assert is_at_rest(model), what
        optimizer.zero_grad()
        assert_bit_equal(exact(model), record.parameters, what=what)
        assert_bit_equal(dict(model.named_buffers()), record.buffers[rank], what=what)


@pytest.mark.world_size(1, 2, 3)
def test_every_model_trains_like_one_process(world_size: int) -> None:
    for name in NAMES:
        check(name, torch.bfloat16)
    if world_size == 2:
        check("conv", torch.float32)
        check("gpt", torch.float32)


@pytest.mark.world_size(2, 4)
def test_every_mode_trains_like_one_process(world_size: int) -> None:
    for arguments in MODES:
        check("gpt", torch.float16, **arguments)
        if world_size == 2:
            check("conv", torch.bfloat16, **arguments)


@pytest.mark.world_size(3)
def test_no_size_has_to_be_a_multiple_of_the_ranks() -> None:
    """Neither that of a chunk, nor that of a parameter larger than one."""
    for chunk_bytes in (2, 62, 2000):
        check("odd-shapes", torch.bfloat16, chunk_bytes=chunk_bytes)
        check("mlp", torch.bfloat16, chunk_bytes=1000 * chunk_bytes)


@pytest.mark.world_size(2)
def test_any_optimizer_may_be_inside() -> None:
    case = CASES["gpt"]
    options = OracleOptions(world_size=2, param_dtype=torch.bfloat16)

    def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    *_, last = run_oracle(case.build, momentum, case.loss, options)
    model, optimizer = build(case.build, momentum, mixed_precision=torch.bfloat16)
    assert isinstance(optimizer, sw.ShardedOptimizer)
    for step in range(3):
        seed(step=step, rank=dist.get_rank(), micro_batch=0)
        optimizer.backward(case.loss(model))
        optimizer.step()
        optimizer.zero_grad()
    assert_bit_equal(exact(model), last.parameters)
