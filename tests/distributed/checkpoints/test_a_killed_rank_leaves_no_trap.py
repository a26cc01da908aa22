"""One rank is killed in the middle of a save: the next job loads, and saves to the same place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.faults import die, watched
from tests.kit.world_size import run_on_ranks

if TYPE_CHECKING:
    from pathlib import Path


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return sw.shard(nn.Linear(7, 5), stage=3)


def _save_and_die(folder: Path, victim: int, last: int) -> None:
    sw.save(folder / "a", _model(1))

    def act(number: int, name: str, arguments: tuple) -> None:
        if dist.get_rank() == victim and number == last:
            die()

    with watched(act):
        sw.save(folder / "b", _model(2))


def _load_and_save(folder: Path) -> None:
    assert sw.latest(folder) == folder / "a"
    sw.load(folder / "a", _model(0))
    dist.barrier()
    sw.save(folder / "b", _model(2))
    assert sw.latest(folder) == folder / "b"
    sw.load(folder / "b", _model(0))
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(("victim", "last"), [(0, 3), (0, 6), (0, 9), (1, 0), (1, 1)])
def test_a_killed_rank_leaves_no_trap(victim: int, last: int, tmp_path: Path) -> None:
    arguments = {"folder": tmp_path, "victim": victim, "last": last}
    died = run_on_ranks(_save_and_die, arguments, world_size=2, timeout_s=20)
    assert any(f"[rank {victim}] died with exit code -9" in text for text in died), died
    assert run_on_ranks(_load_and_save, {"folder": tmp_path}, world_size=2, timeout_s=20) == []
