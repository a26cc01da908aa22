"""``shardwise.export``: the weights of a checkpoint as safetensors files, one tensor at a time.

Layout and index are those that Hugging Face's ``from_pretrained`` reads. Needs no process group and
no library for the format, which is a header in JSON and the elements behind it.

Source: safetensors, Format, 2022 (huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint import disk
from shardwise.checkpoint.data_file import bytes_of
from shardwise.checkpoint.index import OF_OPTIMIZER
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.source import Source, verify
from shardwise.checkpoint.state import OURS
from shardwise.checkpoint.stream import Stream
from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT_BYTES = 8
_OWN_NAME = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
MAX_SHARD_BYTES = 5 * 10**9
"""What Hugging Face writes by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write the parameters and buffers of a checkpoint as safetensors.

    One file ``model.safetensors``, or several and an index where that would be larger than
    ``max_shard_bytes``. Of tied parameters the first name is written; the others are noted in the
    file's metadata, as ``safetensors.torch.save_model`` does.

    Args:
        path: What ``save`` wrote. It is verified first.
        out: A folder. What an earlier export has left there goes; other files are left alone.
        dtype: Cast floating-point tensors to this. None keeps the most exact values there are.
        max_shard_bytes: Largest file, unless one tensor is larger.

    Returns:
        The files, the index last where there is one.

    Raises:
        CheckpointError: The checkpoint is damaged, or has tensors that the format lacks; weights
            cannot be rounded to ``dtype``.

    Collectives: none; call it on one rank.

    Memory: the largest tensor.
    """
    folder = Path(path)
    if max_shard_bytes < 1:
        raise CheckpointError(
            mismatch(
                "max_shard_bytes", expected="at least 1", got=max_shard_bytes, fix="pass bytes"
            )
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(
            mismatch(
                "dtype",
                expected="a floating-point torch.dtype or None",
                got=repr(dtype),
                fix="pass torch.float32, torch.bfloat16 or torch.float16",
            )
        )
    verify(folder, Ranks([]))
    target = Path(out)
    disk.make_parents(target)
    with closing(Source(folder)) as source:
        weights, aliases = _weights(source, dtype)
        shards = _split(weights, max_shard_bytes)
        files = [target / _file_name(number, len(shards)) for number in range(1, len(shards) + 1)]
        for file, shard in zip(files, shards, strict=True):
            _write_shard(file, shard, aliases, source)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(weight.num_bytes for weight in weights)},
            "weight_map": {
                weight.name: file.name
                for file, shard in zip(files, shards, strict=True)
                for weight in shard
            },
        }
        files.append(target / "model.safetensors.index.json")
        _write_file(files[-1], [json.dumps(index, indent=2).encode()])
    _remove_earlier(target, files)
    return files


def _remove_earlier(folder: Path, files: Sequence[Path]) -> None:
    """Remove files of another export: readers take whichever kind they look for first."""
    for file in list(folder.glob("model*.safetensors*")):
        if file not in files and _OWN_NAME.fullmatch(file.name):
            disk.remove_file(file)
    disk.flush_folder(folder)


def _weights(source: Source, dtype: torch.dtype | None) -> tuple[list[_Weight], dict[str, str]]:
    """Return what is to be written, and the names of tied tensors with those they are tied to."""
    weights: list[_Weight] = []
    aliases: dict[str, str] = {}
    by_place: dict[object, str] = {}
    for name, known in source.index.tensors.items():
        if name.startswith((*OF_OPTIMIZER, OURS)):
            continue
        first = by_place.setdefault(source.index.places(name), name)
        if first != name:
            aliases[name] = first
            continue
        kind = known.properties.dtype
        if dtype is not None and kind.is_floating_point:
            kind = dtype
        weight = _Weight(name=name, shape=tuple(known.size), dtype=kind)
        if weight.dtype not in _DTYPES:
            raise CheckpointError(
                mismatch(
                    f"{name!r}",
                    expected="a dtype that safetensors knows",
                    got=weight.dtype,
                    fix="pass dtype=torch.float32",
                )
            )
        weights.append(weight)
    return weights, aliases


def _split(weights: list[_Weight], max_bytes: int) -> list[list[_Weight]]:
    """Put tensors into files, in order, as many as fit."""
    shards: list[list[_Weight]] = [[]]
    used = 0
    for weight in weights:
        if shards[-1] and used + weight.num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(weight)
        used += weight.num_bytes
    return shards


def _file_name(number: int, total: int) -> str:
    """Return the name that from_pretrained looks for."""
    return "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def _write_shard(file: Path, shard: list[_Weight], aliases: dict[str, str], source: Source) -> None:
    """Write one file."""
    own = {weight.name for weight in shard}
    tied = {name: first for name, first in aliases.items() if first in own}
    header: dict[str, object] = {"__metadata__": {"format": "pt", **tied}}
    start = 0
    for weight in shard:
        header[weight.name] = {
            "dtype": _DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [start, start + weight.num_bytes],
        }
        start += weight.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    values = (
        bytes_of(source.tensor(weight.name).to(weight.dtype).contiguous()) for weight in shard
    )
    _write_file(file, chain([len(text).to_bytes(8, "little"), text], values))


def _write_file(file: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file under another name, and give it its own when all of it is on the device."""
    draft = file.with_name(f".{file.name}.partial")
    disk.remove_file(draft)
    stream = Stream(draft)
    try:
        for part in parts:
            stream.write(part)
            del part  # or it would be held while the next is made
        stream.close()
    finally:
        stream.release()
    disk.rename(draft, file)
    disk.flush_folder(file.parent)
