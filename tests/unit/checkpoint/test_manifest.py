"""Files are hashed in blocks that ranks share out; manifests of the first version still count."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.checkpoint.hashes import BLOCK_BYTES, FileSum, Hasher, sum_of
from shardwise.checkpoint.manifest import MANIFEST, check_file, read_manifest, share_of

if TYPE_CHECKING:
    from pathlib import Path

_LENGTHS = st.integers(0, 5 * BLOCK_BYTES)


def _sum(length_bytes: int) -> FileSum:
    return FileSum(length_bytes=length_bytes, hashes=("",) * -(-length_bytes // BLOCK_BYTES))


@given(st.lists(_LENGTHS, max_size=6), st.integers(1, 5))
def test_every_block_is_read_by_one_rank(lengths: list[int], num_ranks: int) -> None:
    files = {f"__{rank}_0.distcp": _sum(length) for rank, length in enumerate(lengths)}
    shares = [share_of(files, rank, num_ranks) for rank in range(num_ranks)]
    taken = [(name, n) for share in shares for name, own in share.items() for n in own]
    expected = [(name, n) for name, one in files.items() for n in range(len(one.hashes))]
    assert sorted(taken) == sorted(expected)


@given(st.integers(1, 20))
def test_ranks_read_the_files_that_they_wrote(num_ranks: int) -> None:
    files = {f"__{rank}_0.distcp": _sum(4 * BLOCK_BYTES) for rank in range(num_ranks)}
    for rank in range(num_ranks):
        assert share_of(files, rank, num_ranks) == {f"__{rank}_0.distcp": [0, 1, 2, 3]}


@pytest.mark.parametrize("step", [1, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_hashes_do_not_depend_on_how_the_data_comes(step: int) -> None:
    length = 5000 if step == 1 else 2 * BLOCK_BYTES + 5
    data = memoryview(torch.arange(length, dtype=torch.int64).to(torch.uint8).numpy().data)
    hasher = Hasher()
    for start in range(0, length, step):
        hasher.update(data[start : start + step])
    assert hasher.finish() == sum_of(bytes(data))


def test_the_block_with_a_flipped_bit_is_named(tmp_path: Path) -> None:
    data = bytearray(3 * BLOCK_BYTES)
    wanted = sum_of(bytes(data))
    data[BLOCK_BYTES + 7] ^= 1
    path = tmp_path / "file"
    path.write_bytes(data)
    check_file(path, wanted, [0, 2])
    with pytest.raises(sw.CheckpointError, match=f"in bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}"):
        check_file(path, wanted)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    wanted = FileSum(length_bytes=tmp_path.stat().st_size, hashes=("0",))
    with pytest.raises(sw.CheckpointError, match=f"{tmp_path.name} expected to be readable"):
        check_file(tmp_path, wanted)


def _rewrite_as_version_1(folder: Path) -> None:
    """Replace a manifest by one that earlier releases wrote."""
    body = json.loads((folder / MANIFEST).read_text())
    old = {
        "format": body["format"],
        "version": 1,
        "world_size": body["world_size"],
        "saved_ns": body["saved_ns"],
        "files": {
            name: {
                "length_bytes": len(data := (folder / name).read_bytes()),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            for name in body["files"]
        },
    }
    own = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**old, "sha256": own}, indent=1) + "\n")


def test_a_checkpoint_of_an_earlier_release_is_verified_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, model = nn.Linear(3, 2), nn.Linear(3, 2)
    sw.save(tmp_path / "a", saved)
    _rewrite_as_version_1(tmp_path / "a")
    assert read_manifest(tmp_path / "a").version == 1
    assert sw.latest(tmp_path) == tmp_path / "a"
    sw.load(tmp_path / "a", model)
    assert torch.equal(model.weight, saved.weight)
    for name in ("__0_0.distcp", ".metadata", MANIFEST):
        path = tmp_path / "a" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(sw.CheckpointError, match=name):
            sw.load(tmp_path / "a", model)
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("name", ["../a", "/etc/hostname", "x/y"])
def test_a_manifest_speaks_of_its_own_folder_alone(name: str, tmp_path: Path) -> None:
    sw.save(tmp_path / "a", nn.Linear(3, 2))
    manifest = read_manifest(tmp_path / "a")
    manifest.files[name] = sum_of(b"")
    (tmp_path / "a" / MANIFEST).write_bytes(manifest.to_bytes())
    with pytest.raises(sw.CheckpointError, match="a damaged one"):
        read_manifest(tmp_path / "a")
