"""Accumulating micro-batches parts no stage from the others, in float32 and in bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed
from tests.kit.pair import STAGES, parameters


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _loss(model: nn.Module) -> Tensor:
    return model(torch.randn(3, 5)).float().square().mean()


@pytest.mark.world_size(2, timeout_s=30)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_accumulation_is_the_same_at_every_stage(
    dtype: torch.dtype, num_micro_batches: int
) -> None:
    half = dtype is torch.bfloat16
    options = OracleOptions(
        world_size=2,
        num_steps=10,
        num_micro_batches=num_micro_batches,
        param_dtype=dtype if half else None,
        reduce_dtype=torch.float32 if half else None,
    )
    expected = run_oracle(_model, _adamw, _loss, options)
    rank = dist.get_rank()
    for stage in STAGES:
        torch.manual_seed(0)
        model = _model()
        inner = _adamw(model)
        precision = sw.MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
        sw.shard(model, stage=stage, mixed_precision=precision)
        optimizer = sw.ShardedOptimizer(inner)
        for step, record in enumerate(expected):
            for micro_batch in range(num_micro_batches):
                seed(step=step, rank=rank, micro_batch=micro_batch)
                loss = _loss(model)
                assert loss.item() == record.losses[rank][micro_batch], (stage, step)
                optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.grad_norm == pytest.approx(record.grad_norm, rel=1e-6)
            rounded = {name: p.to(dtype) for name, p in record.parameters.items()}
            assert_bit_equal(parameters(model), rounded, what=f"stage {stage}")


@pytest.mark.world_size(1, 2, timeout_s=30)
def test_one_large_batch_equals_four_small_ones() -> None:
    """float64, so that only its own rounding separates the two orders of additions."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    x = torch.randn(10, 8, 5, dtype=torch.float64)
    ends = []
    for stage in STAGES:
        for parts in (1, 4):
            torch.manual_seed(0)
            model = sw.shard(_model().double(), stage=stage)
            optimizer = sw.ShardedOptimizer(_adamw(model))
            for batch in x:
                own = batch.chunk(size)[rank] if size > 1 else batch
                for micro_batch in own.chunk(parts):
                    optimizer.backward(model(micro_batch).square().mean() / parts)
                optimizer.step()
                optimizer.zero_grad()
            ends.append(torch.cat([p.flatten() for p in parameters(model).values()]))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-12, atol=1e-13)
