"""A rank killed in the middle of disk traffic leaves no file, and checkpoints as they were."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.runtime import offload as runtime_offload
from shardwise.tiers import (
    AcceleratorTier,
    Copier,
    DiskTier,
    HostTier,
    Tiers,
    WorkerScheduler,
)
from tests.kit.faults import die
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters
from tests.kit.world_size import run_on_ranks
from tests.unit.tiers.faulty import FaultyFileCalls

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS_SAVED = 2


def _build(stage: int, folder: Path | None) -> tuple[nn.Module, sw.ShardedOptimizer]:
    torch.manual_seed(0)
    choice = None
    if folder is not None:
        choice = sw.StaticOffload(
            optimizer=1.0, parameters=float(stage == 3), to="disk", disk_path=folder
        )
    model = sw.shard(
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]),
        stage=stage,
        chunk_bytes=20_000,
        mixed_precision=sw.MixedPrecision(param_dtype=torch.bfloat16),
        offload=choice,
    )
    return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def _train(model: nn.Module, optimizer: sw.ShardedOptimizer, step: int) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
    optimizer.backward(model(x).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _train_and_die(stage: int, place: Path, saves: Path, call: str, last: int, half: bool) -> None:
    """Save, then train until one rank dies at a call on its file."""
    is_armed, num_calls = False, 0

    def fatal(real, descriptor, view, offset):
        nonlocal num_calls
        num_calls += is_armed
        if num_calls == last and dist.get_rank() == 1:
            if half:
                getattr(real, call)(descriptor, view[: len(view) // 2], offset)
            die()
        return getattr(real, call)(descriptor, view, offset)

    def open_tiers(device, **options):
        file = DiskTier(options["disk"], calls=FaultyFileCalls(**{call: fatal}))
        copier = Copier(WorkerScheduler())
        return Tiers(AcceleratorTier(device), HostTier(), file, copier=copier)

    runtime_offload.open_tiers = open_tiers  # type: ignore
    model, optimizer = _build(stage, place)
    for step in range(NUM_STEPS_SAVED):
        _train(model, optimizer, step)
    sw.save(saves / "before", model, optimizer)
    is_armed = True
    for step in range(NUM_STEPS_SAVED, 100):
        _train(model, optimizer, step)


def _continue(stage: int, place: Path, saves: Path) -> None:
    """Load what was saved and train on like a run that nobody killed."""
    assert not list(place.iterdir()), "a file was left"
    model, optimizer = _build(stage, place)
    assert sw.latest(saves) == saves / "before"
    sw.load(saves / "before", model, optimizer)
    reference = _build(stage, None)
    for step in range(NUM_STEPS_SAVED + 2):
        _train(*reference, step)
    for step in range(NUM_STEPS_SAVED, NUM_STEPS_SAVED + 2):
        _train(model, optimizer, step)
    assert_bit_equal(parameters(model), parameters(reference[0]), what="after the kill")
    mine, other = optimizer.state_dict(), reference[1].state_dict()
    for index, state in other["state"].items():
        assert_bit_equal(mine["state"][index], state, what=f"state {index}")
    assert_bit_equal(
        {str(k): v for k, v in mine["shardwise"]["masters"].items()},
        {str(k): v for k, v in other["shardwise"]["masters"].items()},
        what="masters",
    )


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("call", "last", "half"),
    [("read", 1, False), ("read", 7, True), ("write", 1, False), ("write", 5, True)],
)
def test_the_next_run_starts_from_the_checkpoint(stage, call, last, half, tmp_path) -> None:
    place, saves = tmp_path / "place", tmp_path / "saves"
    place.mkdir()
    saves.mkdir()
    arguments = {"stage": stage, "place": place, "saves": saves}
    deadly = partial(run_on_ranks, world_size=2, timeout_s=40)
    died = deadly(_train_and_die, {**arguments, "call": call, "last": last, "half": half})
    assert any("[rank 1] died with exit code -9" in text for text in died), died
    assert run_on_ranks(_continue, arguments, world_size=2, timeout_s=40) == []
