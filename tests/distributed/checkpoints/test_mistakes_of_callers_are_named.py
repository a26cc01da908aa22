"""Slips that a caller makes with good checkpoints are refused in words, and change nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import shardwise as sw


def trained(make=torch.optim.AdamW):
    torch.manual_seed(0)
    model = sw.shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    optimizer = sw.ShardedOptimizer(make(model.parameters(), lr=0.1))
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.world_size(1, 2)
def test_state_of_another_kind_of_optimizer_is_refused(tmp_path) -> None:
    kinds = (torch.optim.AdamW, torch.optim.SGD)
    for kind, other in (kinds, kinds[::-1]):
        path = tmp_path / kind.__name__
        sw.save(path, *trained(kind))
        model, optimizer = trained(other)
        with pytest.raises(sw.CheckpointError, match="missing 'option"):
            sw.load(path, model, optimizer)
        optimizer.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()


@pytest.mark.world_size(1)
def test_weights_are_not_exported_as_integers(tmp_path) -> None:
    sw.save(tmp_path / "checkpoint", *trained())
    for dtype in (torch.int8, "fp16"):
        with pytest.raises(sw.CheckpointError, match="floating-point"):
            sw.export(tmp_path / "checkpoint", tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


_LAST_SAVE = """
import sys, torch, shardwise as sw

def main():
    model = sw.shard(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]))
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters()))
    optimizer.backward(model(torch.ones(1, 512)).sum())
    optimizer.step()
    return sw.save(sys.argv[1], model, optimizer, async_=True), model, optimizer

if sys.argv[2] == "kept":
    kept = main()
else:
    main()
    import gc; gc.collect(); gc.collect()
"""


@pytest.mark.parametrize("model", ["kept", "gone"])
def test_the_last_asynchronous_save_of_a_run_is_not_lost(tmp_path, model) -> None:
    path = tmp_path / "last"
    ended = subprocess.run(
        [sys.executable, "-c", _LAST_SAVE, str(path), model],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert sw.latest(tmp_path) == path


EXTRA = {
    "list": [1, 2],
    "int": 5,
    "function": {"schedule": lambda step: step},
    "iterator": {"data": iter([1])},
}


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("kind", EXTRA)
def test_extra_that_cannot_be_saved_is_refused_on_all_ranks(kind, tmp_path) -> None:
    model, optimizer = trained()
    with pytest.raises(sw.CheckpointError, match="extra"):
        sw.save(tmp_path / "checkpoint", model, optimizer, extra=EXTRA[kind])
    assert not list(tmp_path.iterdir())
    sw.save(tmp_path / "checkpoint", model, optimizer)


@pytest.mark.world_size(1)
def test_latest_wants_the_directory_above(tmp_path) -> None:
    """None would let a script begin anew."""
    sw.save(tmp_path / "step-1", *trained())
    for path in (tmp_path / "step-1", tmp_path / "step-1" / "manifest.json"):
        with pytest.raises(sw.CheckpointError, match="directory above"):
            sw.latest(path)
