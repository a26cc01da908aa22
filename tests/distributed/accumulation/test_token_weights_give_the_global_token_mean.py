"""Ranks and micro-batches with unequal token counts give the gradient of the global token mean."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.pair import STAGES, full_gradients, parameters

_COUNTS = ((3, 6, 1), (6, 2, 5))
"""[rank][micro-batch] -> number of tokens."""


def _tokens(rank: int, micro_batch: int) -> torch.Tensor:
    torch.manual_seed(10 * rank + micro_batch)
    return torch.randn(_COUNTS[rank][micro_batch], 5, dtype=torch.float64)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3, dtype=torch.float64)


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("how", ["weight", "sum", "mean-times-world-size"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_token_weights_give_the_global_token_mean(how: str, num_micro_batches: int) -> None:
    """With `weight`, with gradient_reduction 'sum', or by undoing the mean over ranks by hand."""
    cells = [(r, m) for r in range(2) for m in range(num_micro_batches)]
    plain = _model()
    joined = torch.cat([_tokens(*cell) for cell in cells])
    plain(joined).square().sum(1).mean().backward()
    num_tokens, rank = len(joined), dist.get_rank()
    for stage in STAGES:
        reduction = "sum" if how == "sum" else "mean"
        model = sw.shard(_model(), stage=stage, gradient_reduction=reduction)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for micro_batch in range(num_micro_batches):
            tokens = _tokens(rank, micro_batch)
            loss = model(tokens).square().sum(1).sum()
            if how == "weight":
                optimizer.backward(loss, weight=len(tokens))
            else:
                optimizer.backward(loss / num_tokens * (1 if how == "sum" else 2))
        expected = {name: p.grad for name, p in plain.named_parameters()}
        torch.testing.assert_close(full_gradients(model), expected, rtol=1e-12, atol=1e-14)
        optimizer.step()
        norm = torch.nn.utils.get_total_norm(list(expected.values())).item()
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-12), f"stage {stage}"
        moved = {name: p - 0.1 * expected[name] for name, p in parameters(_model()).items()}
        torch.testing.assert_close(parameters(model), moved, rtol=1e-12, atol=1e-14)
