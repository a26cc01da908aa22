"""What N ranks have saved, M ranks load, bit for bit, at any stage."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.kit.checkpoints import Job, train, whole_state
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import assert_same_state

if TYPE_CHECKING:
    from pathlib import Path

SIZES = (1, 2, 3, 4)
BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)
ON_HOST = {"offload": sw.StaticOffload(optimizer=1.0, parameters=1.0)}
ON_DISK = {
    "offload": sw.StaticOffload(
        optimizer=1.0, parameters=1.0, to="disk", disk_path=tempfile.gettempdir()
    )
}
SETTINGS = {
    **{f"stage{stage}": Job(stage=stage) for stage in range(4)},
    "bf16-stage1": Job(stage=1, precision=BF16),
    "bf16-host": Job(stage=3, precision=BF16, shard=ON_HOST),
    "bf16-disk": Job(stage=3, precision=BF16, shard=ON_DISK),
}


def _exchange(tmp_path: Path, one: Job, others: list[Job]) -> None:
    """Save from one job and load into others; every rank of all compares."""
    started = one.start(seed=1)
    expected = None
    if started is not None:
        model, optimizer = started
        train(model, optimizer, 2)
        expected = whole_state(model, optimizer)
        sw.save(tmp_path / "checkpoint", model, optimizer, extra={"step": 2})
    box = [expected]
    dist.broadcast_object_list(box, src=0)
    expected = box[0]
    assert expected is not None
    for other in others:
        started = other.start(seed=2)
        if started is not None:
            model, optimizer = started
            assert sw.load(tmp_path / "checkpoint", model, optimizer) == {"step": 2}
            actual = whole_state(model, optimizer)
            assert_bit_equal(actual["parameters"], expected["parameters"], what=str(other))
            assert_bit_equal(actual["buffers"], expected["buffers"], what=str(other))
            assert_same_state(actual["optimizer"], expected["optimizer"])
        dist.barrier()


@pytest.mark.world_size(4, timeout_s=60)
@pytest.mark.parametrize("num_savers", SIZES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_tensor_is_bit_equal_at_any_world_size(
    num_savers: int, setting: str, tmp_path: Path
) -> None:
    one, *others = [replace(SETTINGS[setting], size=size) for size in (num_savers, *SIZES)]
    _exchange(tmp_path, one, others)
