"""One file of tensors and objects as DCP lays it out: one behind the other, by ``torch.save``.

Legend: a *place* is the file, the first byte and the number of bytes of one of them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils.serialization import config

from shardwise.checkpoint.entries import Thing, decode
from shardwise.checkpoint.payload import find_payload
from shardwise.checkpoint.stream import Stream
from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from shardwise.checkpoint.entries import Entry
    from shardwise.checkpoint.hashes import FileSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Where one entry lies, for the index."""

    names: tuple[str, ...]
    start_byte: int
    length_bytes: int
    dtype: torch.dtype | None = None
    """None for an object; what follows is of tensors only."""
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """What one rank has written."""

    name: str
    sum: FileSum
    entries: list[Written]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """One box in a file."""

    name: str
    start_byte: int
    length_bytes: int
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """Where a part of a stored box goes."""

    source: tuple[slice, ...]
    memory: torch.Tensor


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes, as DCP calls it."""
    return f"__{rank}_0.distcp"


def write_file(path: Path, entries: Iterable[Entry]) -> FileReport:
    """Write entries to a new file, one at a time.

    Without the checksums that torch puts into its archives: the hash of the file takes their place.
    Memory: a contiguous copy on the CPU of one box, where it is not contiguous there.
    """
    with config.patch(  # pyrefly: ignore [missing-attribute] - put there when it is imported
        "save.compute_crc32", False
    ):
        return _write_file(path, entries)


def _write_file(path: Path, entries: Iterable[Entry]) -> FileReport:
    """Write entries to a new file."""
    stream = Stream(path)
    try:
        written: list[Written] = []
        for entry in entries:
            start_byte = stream.length_bytes
            if isinstance(entry, Thing):
                stream.write(entry.data)
                length_bytes = stream.length_bytes - start_byte
                written.append(
                    Written(names=entry.names, start_byte=start_byte, length_bytes=length_bytes)
                )
                continue
            tensor = _own(entry.tensor)
            torch.save(tensor, stream)  # pyrefly: ignore [bad-argument-type] - it needs write alone
            written.append(
                Written(
                    names=entry.names,
                    start_byte=start_byte,
                    length_bytes=stream.length_bytes - start_byte,
                    dtype=tensor.dtype,
                    shape=entry.shape,
                    offset=entry.offset,
                    size=tuple(tensor.shape),
                )
            )
        return FileReport(name=path.name, sum=stream.close(), entries=written)
    finally:
        stream.release()


def write_bytes(path: Path, data: bytes) -> FileSum:
    """Write a whole new file."""
    stream = Stream(path)
    try:
        stream.write(data)
        return stream.close()
    finally:
        stream.release()


class DataReader:
    """An open file of tensors and objects."""

    def __init__(self, path: Path, *, is_plain: bool) -> None:
        """Open it.

        Args:
            path: The file.
            is_plain: Its tensors are known to be contiguous: ``write_file`` has written them.
        """
        self._path = path
        self._is_plain = is_plain
        self._descriptor = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)

    def read_object(self, name: str, start_byte: int, length_bytes: int) -> object:
        """Return an object or a tensor; runs no code from the file."""
        data = bytearray(length_bytes)
        self._read(memoryview(data), start_byte)
        return decode(name, data)

    def read_tensor(self, box: StoredBox, targets: Sequence[Target]) -> None:
        """Copy parts of one stored box into memory, at once where they are the whole of it."""
        payload = None
        if self._is_plain:
            payload = find_payload(self._descriptor, box.start_byte, box.length_bytes)
        if payload is None or payload[1] != math.prod(box.size) * box.dtype.itemsize:
            stored = self._load(box)
        else:
            (only, *others) = targets
            if not others and _takes(only.memory, box):
                self._read(bytes_of(only.memory), payload[0])
                return
            stored = torch.empty(box.size, dtype=box.dtype)
            self._read(bytes_of(stored), payload[0])
        for target in targets:
            target.memory.copy_(stored[target.source])

    def _load(self, box: StoredBox) -> torch.Tensor:
        """Return a stored box by torch.load."""
        tensor = self.read_object(box.name, box.start_byte, box.length_bytes)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != box.size:
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise CheckpointError(
                mismatch(
                    f"{box.name!r} in {self._path}",
                    expected=f"a tensor of shape {box.size}",
                    got=got,
                    fix="load another checkpoint: this one contradicts itself",
                )
            )
        return tensor

    def _read(self, out: memoryview, start_byte: int) -> None:
        """Fill memory from the file."""
        while len(out):
            num_bytes = os.preadv(self._descriptor, [out], start_byte)
            if num_bytes == 0:
                raise CheckpointError(
                    mismatch(
                        str(self._path),
                        expected=f"at least {start_byte + len(out)} bytes",
                        got="fewer",
                        fix="load another checkpoint: this one was cut off",
                    )
                )
            out, start_byte = out[num_bytes:], start_byte + num_bytes


def _takes(memory: torch.Tensor, box: StoredBox) -> bool:
    """Return whether a stored box can be read into memory as it is."""
    is_same = tuple(memory.shape) == box.size and memory.dtype == box.dtype
    return is_same and memory.device.type == "cpu" and memory.is_contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU whose storage holds nothing else, without a copy if it can be."""
    value = tensor.detach().to("cpu").contiguous()
    if value.numel() == 0 or value.untyped_storage().nbytes() == value.nbytes:
        return value.clone() if value.numel() == 0 else value
    return torch.frombuffer(bytes_of(value), dtype=value.dtype).view(value.shape)
