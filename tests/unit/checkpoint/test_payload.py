"""The bytes of a tensor are found in what torch.save wrote, and nothing is found elsewhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from shardwise.checkpoint.payload import find_payload

if TYPE_CHECKING:
    from pathlib import Path


def _write(path: Path, data: bytes) -> int:
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1000, 70)], ids=str)
def test_the_elements_are_where_it_says(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    path = tmp_path / "one"
    torch.save(tensor, path)
    archive = path.read_bytes()
    descriptor = _write(path, b"before" + archive + b"behind")
    found = find_payload(descriptor, len(b"before"), len(archive))
    assert found is not None
    start, num_bytes = found
    data = bytearray(os.pread(descriptor, num_bytes, start))
    os.close(descriptor)
    assert torch.equal(torch.frombuffer(data, dtype=dtype).view(shape), tensor)


@pytest.mark.parametrize("length", [0, 10, 22, 100, 3000])
def test_nothing_is_found_in_other_data(length: int, tmp_path: Path) -> None:
    for data in (b"\0" * length, b"PK\x05\x06" * (length // 4)):
        descriptor = _write(tmp_path / "other", data)
        assert find_payload(descriptor, 0, len(data)) is None
        os.close(descriptor)
