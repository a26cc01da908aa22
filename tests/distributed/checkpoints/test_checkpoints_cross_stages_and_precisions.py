"""A checkpoint knows nothing of the stage, face or precision that it was trained with."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardwise as sw
from tests.kit.checkpoints import Job, train, whole_state
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import assert_same_state

if TYPE_CHECKING:
    from pathlib import Path

BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)
ON_HOST = sw.StaticOffload(optimizer=1.0, parameters=1.0)
ON_DISK = sw.StaticOffload(
    optimizer=1.0, parameters=1.0, to="disk", disk_path=tempfile.gettempdir()
)
STATE_ON_DISK = sw.StaticOffload(optimizer=1.0, to="disk", disk_path=tempfile.gettempdir())
JOBS = {
    "stage0": Job(stage=0),
    "stage1": Job(stage=1),
    "stage3": Job(stage=3),
    "optimizer-alone": Job(stage=2, is_plain=True),
    "hybrid": Job(stage=3, shard={"shard_size": 2}),
    "small-chunks": Job(stage=3, shard={"chunk_bytes": 64}),
    "bf16-stage2": Job(stage=2, precision=BF16),
    "bf16-stage3": Job(stage=3, precision=BF16),
    "host-stage3": Job(stage=3, shard={"offload": ON_HOST}),
    "disk-stage3": Job(stage=3, shard={"offload": ON_DISK}),
    "disk-bf16-stage2": Job(stage=2, precision=BF16, shard={"offload": STATE_ON_DISK}),
}


def _rounded(values: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.to(like[name].dtype) for name, value in values.items()}


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("saver", JOBS)
def test_every_tensor_survives_any_change_of_setting(saver: str, tmp_path: Path) -> None:
    started = JOBS[saver].start(seed=1)
    assert started is not None
    train(*started, 2)
    expected = whole_state(*started)
    sw.save(tmp_path / "checkpoint", *started)
    for name, job in JOBS.items():
        loaded = job.start(seed=2)
        assert loaded is not None
        sw.load(tmp_path / "checkpoint", *loaded)
        actual = whole_state(*loaded)
        # what has no master (frozen, or trained without 16 bits) rounds where it is loaded
        wanted = _rounded(expected["parameters"], actual["parameters"])
        assert_bit_equal(actual["parameters"], wanted, what=f"{saver} -> {name}")
        assert_bit_equal(actual["buffers"], expected["buffers"], what=f"{saver} -> {name}")
        for side in (actual, expected):
            side["optimizer"].pop("shardwise", None)
        assert_same_state(actual["optimizer"], expected["optimizer"])


@pytest.mark.world_size(4, timeout_s=60)
def test_replicas_of_a_hybrid_mesh_write_once(tmp_path: Path) -> None:
    started = Job(stage=3, shard={"shard_size": 2}).start(seed=1)
    assert started is not None
    train(*started, 1)
    expected = whole_state(*started)
    sw.save(tmp_path / "checkpoint", *started)
    first, last = (
        (tmp_path / "checkpoint" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 3)
    )
    assert last < first
    loaded = Job(stage=2).start(seed=2)
    assert loaded is not None
    sw.load(tmp_path / "checkpoint", *loaded)
    assert_same_state(whole_state(*loaded)["optimizer"], expected["optimizer"])


@pytest.mark.world_size(1, 2, timeout_s=60)
@pytest.mark.parametrize("async_", [False, True])
def test_what_rests_on_disk_is_saved_and_goes_on_exactly(async_: bool, tmp_path: Path) -> None:
    job = Job(stage=3, precision=BF16, shard={"offload": ON_DISK})
    started = job.start(seed=1)
    assert started is not None
    train(*started, 2)
    pending = sw.save(tmp_path / "checkpoint", *started, async_=async_)
    train(*started, 3)
    if pending is not None:
        pending.wait()
    resumed = job.start(seed=2)
    assert resumed is not None
    sw.load(tmp_path / "checkpoint", *resumed)
    train(*resumed, 3)
    expected, actual = whole_state(*started), whole_state(*resumed)
    assert_bit_equal(actual["parameters"], expected["parameters"], what="three steps later")
    assert_same_state(actual["optimizer"], expected["optimizer"])
