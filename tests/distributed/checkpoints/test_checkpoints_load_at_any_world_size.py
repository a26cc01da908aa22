"""What N ranks have saved, M ranks load, bit for bit, at any stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

import shardwise as sw
from tests.kit.checkpoints import Job, train, whole_state
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import assert_same_state

if TYPE_CHECKING:
    from pathlib import Path

SIZES = (1, 2, 3, 4)


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
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_tensor_is_bit_equal_at_any_world_size(
    num_savers: int, stage: int, tmp_path: Path
) -> None:
    others = [Job(stage=stage, size=size) for size in SIZES]
    _exchange(tmp_path, Job(stage=stage, size=num_savers), others)
