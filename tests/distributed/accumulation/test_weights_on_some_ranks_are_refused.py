"""A weighted pass on one rank and a plain one on another raise on both, and can be repeated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.pair import STAGES, parameters


def _backward(module: nn.Module, optimizer: sw.ShardedOptimizer, *, is_weighted: bool) -> None:
    loss = module(torch.ones(2, 7)).sum()
    optimizer.backward(loss, weight=2 if is_weighted else None)


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("plain", ["optimizer.backward", "loss.backward", "no_sync"])
def test_weights_on_some_ranks_are_refused_on_all(plain: str) -> None:
    for stage in STAGES:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
        sw.shard(module, stage=stage, chunk_bytes=128)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
        before = parameters(module)
        with pytest.raises(sw.ShardwiseError, match="a weight for all passes"):  # noqa: PT012
            if dist.get_rank() == 0:
                _backward(module, optimizer, is_weighted=True)
            elif plain == "optimizer.backward":
                _backward(module, optimizer, is_weighted=False)
            elif plain == "loss.backward":
                module(torch.ones(2, 7)).sum().backward()
            else:
                with optimizer.no_sync():
                    _backward(module, optimizer, is_weighted=False)
                optimizer.step()
        optimizer.zero_grad()
        _backward(module, optimizer, is_weighted=True)
        optimizer.step()
        after = parameters(module)
        # the last bias has gradient 1 for each of the two tokens of a rank, so 1 a token
        torch.testing.assert_close(after["2.bias"], before["2.bias"] - 0.1)
