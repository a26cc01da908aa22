"""bfloat16 parameters with float32 gradients train where the last ranks own no element."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed
from tests.kit.pair import STAGES, parameters


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def _loss(model: nn.Module) -> Tensor:
    return model(torch.randn(5, 3)).float().square().mean()


@pytest.mark.world_size(4, timeout_s=20)
def test_ranks_that_own_nothing_take_part() -> None:
    options = OracleOptions(world_size=4, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = run_oracle(_Weight, _adam, _loss, options)
    precision = sw.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for stage in STAGES:
        torch.manual_seed(0)
        model = sw.shard(_Weight(), stage=stage, mixed_precision=precision)
        optimizer = sw.ShardedOptimizer(_adam(model))
        for step, record in enumerate(expected):
            seed(step=step, rank=dist.get_rank(), micro_batch=0)
            optimizer.backward(_loss(model))
            optimizer.step()
            optimizer.zero_grad()
            rounded = {name: p.bfloat16() for name, p in record.parameters.items()}
            assert_bit_equal(parameters(model), rounded)
