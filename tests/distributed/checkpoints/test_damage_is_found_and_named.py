"""A flipped byte in any file is found, named, and costs the one checkpoint that it is in."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.hashes import sum_of
from shardwise.checkpoint.index import INDEX
from shardwise.checkpoint.manifest import MANIFEST, read_manifest
from tests.kit.oracle import assert_bit_equal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_FLIPS = 40


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return sw.shard(nn.Linear(3, 2), stage=2)


def _positions(length_bytes: int) -> Iterator[int]:
    """Yield places all over a file, its first and last byte among them."""
    yield from range(0, length_bytes, max(1, length_bytes // NUM_FLIPS))
    yield length_bytes - 1


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_a_flipped_byte_in_any_file_is_found_and_named(tmp_path: Path, world_size: int) -> None:
    sw.save(tmp_path / "a", _model(1))
    sw.save(tmp_path / "b", _model(2))
    model = _model(3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    rank = torch.distributed.get_rank()
    files = sorted((tmp_path / "b").iterdir())
    assert len(files) == world_size + 2
    for path in files:
        data = path.read_bytes()
        for position in _positions(len(data)):
            torch.distributed.barrier()
            if rank == 0:
                changed = bytearray(data)
                changed[position] ^= 1
                path.write_bytes(changed)
            torch.distributed.barrier()
            with pytest.raises(sw.CheckpointError, match=path.name):
                sw.load(tmp_path / "b", model)
            assert sw.latest(tmp_path) == tmp_path / "a"
        torch.distributed.barrier()
        if rank == 0:
            path.write_bytes(data)
    torch.distributed.barrier()
    assert_bit_equal(dict(model.named_parameters()), before)
    assert sw.latest(tmp_path) == tmp_path / "b"


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("damage", ["lost", "short", "long"])
def test_lost_and_torn_files_are_found_and_named(damage: str, tmp_path: Path) -> None:
    sw.save(tmp_path / "a", _model(1))
    sw.save(tmp_path / "b", _model(2))
    for path in sorted((tmp_path / "b").iterdir()):
        data = path.read_bytes()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            if damage == "lost":
                path.unlink()
            else:
                path.write_bytes(data[:-1] if damage == "short" else data + b"\0")
        torch.distributed.barrier()
        with pytest.raises(sw.CheckpointError, match=path.name):
            sw.load(tmp_path / "b", _model(3))
        assert sw.latest(tmp_path) == tmp_path / "a"
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            path.write_bytes(data)
        torch.distributed.barrier()


class _Attack:
    """Runs code when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def _seal(folder: Path) -> None:
    """Give changed files the manifest that they would have had."""
    sums = {name: sum_of((folder / name).read_bytes()) for name in read_manifest(folder).files}
    manifest = replace(read_manifest(folder), files=sums)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())


@pytest.mark.world_size(1, timeout_s=60)
def test_nothing_in_a_forged_checkpoint_runs(tmp_path: Path) -> None:
    """Hashes are no signature: a forger can make them, so safety must not rest on them."""
    trace = tmp_path / "trace"
    attack = pickle.dumps(_Attack(f"touch {trace}"))
    good = tmp_path / "good"
    sw.save(good, _model(1), extra={"step": 1})
    original = (good / "__0_0.distcp").read_bytes()
    index = (good / INDEX).read_bytes()

    (good / INDEX).write_bytes(attack)
    _seal(good)
    with pytest.raises(sw.CheckpointError, match="it asks for posix"):
        sw.load(good, _model(2))

    (good / INDEX).write_bytes(index)
    starts = [at for at in range(len(original)) if original.startswith(b"PK\x03\x04", at)]
    for start in starts:
        forged = original[:start] + attack + original[start + len(attack) :]
        (good / "__0_0.distcp").write_bytes(forged)
        _seal(good)
        with contextlib.suppress(sw.CheckpointError):
            sw.load(good, _model(2))
        assert not trace.exists()
    assert sw.latest(tmp_path) == good  # its hashes are right
    assert not trace.exists()


@pytest.mark.world_size(1, timeout_s=60)
def test_a_checkpoint_reads_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", _model(1))
    path = tmp_path / "a" / INDEX
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../a/__0_0.distcp"
    path.write_bytes(pickle.dumps(metadata))
    _seal(tmp_path / "a")
    with pytest.raises(sw.CheckpointError, match="lies outside of the folder"):
        sw.load(tmp_path / "a", _model(2))


@pytest.mark.world_size(1, timeout_s=60)
def test_a_newer_version_is_refused_as_such(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", _model(1))
    path = tmp_path / "a" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(sw.CheckpointError, match="version 99"):
        sw.load(tmp_path / "a", _model(2))
