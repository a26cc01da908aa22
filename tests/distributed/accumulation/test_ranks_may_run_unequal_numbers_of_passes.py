"""A rank without further micro-batches goes to `step`, and takes part in what others still do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import UNEVEN_STAGES, parameters


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _loss(model: nn.Module, rank: int, micro_batch: int) -> Tensor:
    torch.manual_seed(10 * rank + micro_batch)
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(2, 3, timeout_s=20)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
def test_ranks_may_run_unequal_numbers_of_passes(bare: bool) -> None:
    """Rank r runs 3 - r passes, then steps: also none at all. Absent passes count as zero."""
    size = dist.get_world_size()
    for stage in UNEVEN_STAGES:
        for chunk_bytes in (None, 64):
            model = sw.shard(_model(), stage=stage, chunk_bytes=chunk_bytes)
            optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
            plain = _model()
            plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
            for _ in range(3):
                for micro_batch in range(3 - dist.get_rank() - (size == 3)):
                    loss = _loss(model, dist.get_rank(), micro_batch)
                    loss.backward() if bare else optimizer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                _plain_step(plain, plain_optimizer, size)
                assert_bit_equal(parameters(model), parameters(plain), what=f"stage {stage}")


def _plain_step(plain: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
    """Reduce micro-batch by micro-batch, as the ranks meet."""
    named = list(plain.parameters())
    totals = [torch.zeros_like(p) for p in named]
    for micro_batch in range(3):
        ranks = [r for r in range(size) if micro_batch < 3 - r - (size == 3)]
        if not ranks:
            continue
        of_ranks = [torch.autograd.grad(_loss(plain, r, micro_batch), named) for r in ranks]
        for total, parts in zip(totals, zip(*of_ranks, strict=True), strict=True):
            total += sum(parts[1:], parts[0].clone()) / size
    for parameter, total in zip(named, totals, strict=True):
        parameter.grad = total
    optimizer.step()
