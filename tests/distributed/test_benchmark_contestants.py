"""Contestants of the benchmark train alike: a difference in speed is not one in work."""

from __future__ import annotations

import pytest
import torch

from benchmarks.contestants import BASELINE, CONTESTANTS, make_step
from benchmarks.gpt import GPT, SIZES


def _losses(contestant, dtype):
    config = SIZES["tiny"]
    torch.manual_seed(0)
    step = make_step(contestant, GPT(config), dtype=dtype, chunk_bytes=None)
    tokens = torch.randint(config.vocabulary, (4, config.batch, config.sequence + 1))
    return [step(batch).item() for batch in tokens]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_contestant_has_the_losses_of_the_baseline(dtype):
    losses = {contestant.name: _losses(contestant, dtype) for contestant in CONTESTANTS}
    # fp32: one order of additions against another. bf16: autocast keeps float32 weights.
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for of_one in losses.values():
        assert of_one == pytest.approx(losses[BASELINE], rel=tolerance)
