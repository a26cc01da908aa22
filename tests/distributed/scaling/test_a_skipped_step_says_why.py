"""The log tells a step without weight from one with a gradient that is not finite."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import shardwise as sw


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize(
    ("factor", "weight", "message"),
    [
        (1.0, 0, "step skipped: the global weight is 0"),
        (float("nan"), 1, "step skipped: the global gradient norm is nan"),
    ],
    ids=["weight", "nan"],
)
def test_a_skipped_step_says_why(factor: float, weight: int, message: str) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.handle = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    model = sw.shard(nn.Linear(4, 1), stage=2)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.backward(model(torch.full((1, 4), factor)).sum(), weight=weight)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert lines == [message]
