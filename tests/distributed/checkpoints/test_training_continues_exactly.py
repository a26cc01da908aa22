"""Ten steps after a resume have the bits of the run that never stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.kit.checkpoints import Job, train, whole_state
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import assert_same_state

if TYPE_CHECKING:
    from pathlib import Path

FP16 = sw.MixedPrecision(
    param_dtype=torch.float16, loss_scale=sw.LossScale(initial_scale=2.0**20, growth_interval=3)
)
BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)


def _start(job: Job, *, seed: int) -> tuple[Any, Any, Any]:
    started = job.start(seed=seed)
    assert started is not None
    model, optimizer = started
    torch.manual_seed(seed + dist.get_rank())  # other data and dropout on every rank
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def _train(model: Any, optimizer: Any, scheduler: Any, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        losses += train(model, optimizer, 1)
        scheduler.step()
    return losses


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [None, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_ten_steps_after_a_resume_are_those_of_the_run_that_never_stopped(
    stage: int, precision: sw.MixedPrecision | None, tmp_path: Path
) -> None:
    job = Job(stage=stage, precision=precision)
    model, optimizer, scheduler = _start(job, seed=1)
    _train(model, optimizer, scheduler, 4)
    extra = {"scheduler": scheduler.state_dict()}
    sw.save(tmp_path / "checkpoint", model, optimizer, extra=extra)
    losses = _train(model, optimizer, scheduler, 10)

    resumed, its_optimizer, its_scheduler = _start(job, seed=20)
    extra = sw.load(tmp_path / "checkpoint", resumed, its_optimizer)
    its_scheduler.load_state_dict(extra["scheduler"])
    assert _train(resumed, its_optimizer, its_scheduler, 10) == losses
    expected, actual = whole_state(model, optimizer), whole_state(resumed, its_optimizer)
    assert_bit_equal(actual["parameters"], expected["parameters"])
    assert_bit_equal(actual["buffers"], expected["buffers"])
    assert_same_state(actual["optimizer"], expected["optimizer"])
    assert its_optimizer.loss_scale == optimizer.loss_scale
