"""A dtype changed after sharding is an error, not silently the old dtype again at the next step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, has_values_outside, opened, parameters


def _step(model: nn.Module, optimizer: sw.ShardedOptimizer) -> None:
    x = torch.ones(2, 5, dtype=next(model.parameters()).dtype)
    optimizer.backward(model(x).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_casts_after_sharding_are_refused() -> None:
    for stage in STAGES:
        for dtype in (torch.float64, torch.bfloat16):
            model = sw.shard(nn.Linear(5, 3), stage=stage)
            optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
            _step(model, optimizer)
            if not has_values_outside(stage):
                _check_casts_of_absent_parameters(model, dtype)
                _step(model, optimizer)
                continue
            model.to(dtype)
            with pytest.raises(sw.ShardwiseError, match=r"float32.*cast"):
                optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(sw.ShardwiseError, match=r"float32.*cast"):
                _step(model, optimizer)
            model.float()
            optimizer.zero_grad()
            _step(model, optimizer)


def _check_casts_of_absent_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Nothing is cast: outside there are no values, and what is cast inside is not kept."""
    with pytest.raises(sw.ShardwiseError, match="full_parameters"):
        model.to(dtype)
    for writeback, message in ((False, "writeback=True"), (True, "float32.*cast")):
        with (
            pytest.raises(sw.ShardwiseError, match=message),
            sw.full_parameters(model, writeback=writeback),
        ):
            model.to(dtype)
        assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_a_cast_there_and_back_is_no_change() -> None:
    """float64 and back keeps every bit, so evaluation in another dtype is possible."""
    for stage in STAGES:
        ends = []
        for casts in (False, True):
            torch.manual_seed(0)
            model = sw.shard(nn.Linear(5, 3), stage=stage)
            optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
            for _ in range(2):
                optimizer.backward(model(torch.ones(1, 5)).sum())
                _step(model, optimizer)
                if casts:
                    with opened(model, stage, writeback=True):
                        model.double()
                        model(torch.ones(2, 5, dtype=torch.float64))
                        model.float()
            ends.append(parameters(model))
        assert_bit_equal(ends[1], ends[0])
