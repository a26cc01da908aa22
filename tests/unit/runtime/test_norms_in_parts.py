"""The norm of a long 16-bit gradient is that of its elements, without a wide copy of all of it."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.runtime import norms


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_parts_give_the_norm_of_the_whole(order, dtype, divisor, monkeypatch) -> None:
    monkeypatch.setattr(norms, "_PART_NUMEL", 100)
    values = torch.randn(1003, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = norms._norm(values, order, torch.float32, divisor)
    expected = torch.linalg.vector_norm(values.double() / divisor, order)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_element_that_is_no_number_is_seen(value, monkeypatch) -> None:
    monkeypatch.setattr(norms, "_PART_NUMEL", 100)
    values = torch.ones(1003, dtype=torch.bfloat16)
    values[555] = value
    assert not norms._norm(values, 2.0, torch.float32, 1.0).isfinite()


def test_wide_copies_are_of_one_part(monkeypatch) -> None:
    monkeypatch.setattr(norms, "_PART_NUMEL", 1000)
    values = torch.ones(100_000, dtype=torch.bfloat16)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        norms._norm(values, 2.0, torch.float32, 1.0)
    most = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < most <= 4_800
