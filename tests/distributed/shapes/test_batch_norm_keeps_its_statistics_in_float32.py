"""Under mixed precision batch norm keeps dtype and statistics, and other buffers their bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed
from tests.kit.pair import STAGES


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.register_buffer("integer", torch.tensor([2**40 + 1]))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _loss(model: nn.Module) -> Tensor:
    return model(torch.randn(6, 5)).float().square().mean()


@pytest.mark.world_size(2, timeout_s=30)
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, None], ids=["bfloat16", "own"])
def test_batch_norm_keeps_its_statistics_in_float32(param_dtype: torch.dtype | None) -> None:
    """SyncBatchNorm is left out: torch has it for accelerators only."""
    options = OracleOptions(
        world_size=2, num_steps=10, param_dtype=param_dtype, reduce_dtype=torch.float32
    )
    expected = run_oracle(_Normed, _sgd, _loss, options)
    rank = dist.get_rank()
    precision = sw.MixedPrecision(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for stage in STAGES:
        torch.manual_seed(0)
        model = sw.shard(_Normed(), stage=stage, mixed_precision=precision)
        optimizer = sw.ShardedOptimizer(_sgd(model))
        for step, record in enumerate(expected):
            seed(step=step, rank=rank, micro_batch=0)
            loss = _loss(model)
            assert loss.item() == record.losses[rank][0], (stage, step)
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            assert_bit_equal(dict(model.named_buffers()), record.buffers[rank])
        assert model.norm.weight.dtype is torch.float32
        assert model.norm.running_mean.dtype is torch.float32
        assert model.norm.num_batches_tracked == 10
