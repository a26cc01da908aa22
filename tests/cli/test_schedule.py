"""The learning rate rises linearly, falls as half a cosine, and ends on its floor."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.train.schedule import factor, warmup_then_cosine


@given(
    steps=st.integers(1, 200), warmup_steps=st.integers(0, 250), final_fraction=st.floats(0.0, 1.0)
)
def test_rises_then_falls_and_stays_within_bounds(steps, warmup_steps, final_fraction):
    settings = {"steps": steps, "warmup_steps": warmup_steps, "final_fraction": final_fraction}
    shares = [factor(step, **settings) for step in range(steps)]
    assert all(0.0 <= share <= 1.0 + 1e-12 for share in shares)
    warm, rest = shares[:warmup_steps], shares[max(warmup_steps - 1, 0) :]
    assert warm == sorted(warm)
    assert all(a >= b - 1e-12 for a, b in pairwise(rest))


@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
def test_peaks_at_the_end_of_the_warm_up_and_ends_on_the_floor(warmup_steps):
    settings = {"steps": 20, "warmup_steps": warmup_steps, "final_fraction": 0.1}
    shares = [factor(step, **settings) for step in range(20)]
    assert shares[max(warmup_steps - 1, 0)] == 1.0
    assert shares[-1] == pytest.approx(0.1)
    assert factor(100, **settings) == pytest.approx(0.1)


def test_every_group_keeps_its_own_highest_rate():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 1.0}, {"params": [weights[1]], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = warmup_then_cosine(optimizer, steps=10, warmup_steps=4, final_fraction=0.0)
    seen = []
    for _ in range(10):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert [high / low for high, low in seen[:-1]] == pytest.approx([2.0] * 9)
    assert seen[3] == [1.0, 0.5]
