"""Losses are scaled from the moment a float16 parameter is trained, not only if one was before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw

TINY = 2.0**-26
"""Below the least float16 that a gradient of 1 times this would round to."""


def train(optimizer: sw.ShardedOptimizer, weight: nn.Parameter) -> None:
    optimizer.zero_grad()
    optimizer.backward((weight.float() * TINY).sum())
    optimizer.step()


@pytest.mark.world_size(2)
def test_a_group_of_float16_parameters_added_later_is_scaled() -> None:
    first = nn.Parameter(torch.ones(5))
    optimizer = sw.ShardedOptimizer(
        torch.optim.SGD([first], lr=2.0**20), stage=2, mixed_precision=sw.MixedPrecision()
    )
    assert optimizer.loss_scale == 1.0
    late = nn.Parameter(torch.ones(5, dtype=torch.float16))
    optimizer.add_param_group({"params": [late]})
    assert optimizer.loss_scale == 2.0**16
    train(optimizer, late)
    assert torch.equal(late.float(), torch.full((5,), 1 - 2.0**-6))
    with pytest.raises(sw.ShardwiseError, match=r"optimizer\.backward"):
        (late.float() * TINY).sum().backward()


@pytest.mark.world_size(2)
def test_a_float16_parameter_unfrozen_later_is_scaled() -> None:
    model = nn.Module()
    model.trained = nn.Parameter(torch.ones(5))
    model.late = nn.Parameter(torch.ones(5, dtype=torch.float16), requires_grad=False)
    sw.shard(model, stage=2, mixed_precision=sw.MixedPrecision())
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**20))
    assert optimizer.loss_scale == 1.0
    model.late.requires_grad_(True)
    assert optimizer.loss_scale == 2.0**16
    train(optimizer, model.late)
    assert torch.equal(model.late.float(), torch.full((5,), 1 - 2.0**-6))
