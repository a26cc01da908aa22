"""One file of tensors and objects as DCP lays it out: one behind the other, by ``torch.save``.

Legend: a *place* is the file, the first byte and the number of bytes of one of them.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint import disk
from shardwise.checkpoint.entries import Thing, decode
from shardwise.checkpoint.manifest import FileSum
from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shardwise.checkpoint.entries import Entry

_BUFFER_BYTES = 2**20


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


class _Stream:
    """A file that hashes what is written to it, and puts small writes together."""

    def __init__(self, descriptor: int) -> None:
        """Write to an open file."""
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self._waiting = bytearray()
        self.length_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Take some bytes."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self.length_bytes += len(view)
        if len(view) < _BUFFER_BYTES:
            self._waiting += view
        if len(self._waiting) >= _BUFFER_BYTES or len(view) >= _BUFFER_BYTES:
            self._empty()
        if len(view) >= _BUFFER_BYTES:
            disk.write(self._descriptor, view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: ``close`` does."""

    def close(self) -> FileSum:
        """Return what the file is, once all of it is on the device."""
        self._empty()
        disk.flush(self._descriptor)
        return FileSum(length_bytes=self.length_bytes, sha256=self._digest.hexdigest())

    def _empty(self) -> None:
        """Write what has been put together."""
        if self._waiting:
            disk.write(self._descriptor, bytes(self._waiting))
            self._waiting.clear()


def write_file(path: Path, entries: Iterable[Entry]) -> FileReport:
    """Write entries to a new file, one at a time.

    Memory: a contiguous copy on the CPU of one box.
    """
    descriptor = disk.create(path)
    try:
        stream = _Stream(descriptor)
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
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> FileSum:
    """Write a whole new file."""
    descriptor = disk.create(path)
    try:
        stream = _Stream(descriptor)
        stream.write(data)
        return stream.close()
    finally:
        os.close(descriptor)


class DataReader:
    """An open file of tensors and objects."""

    def __init__(self, path: Path) -> None:
        """Open it."""
        self._path = path
        self._file = path.open("rb", buffering=0)

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def read_object(self, name: str, start_byte: int, length_bytes: int) -> object:
        """Return an object or a tensor; runs no code from the file."""
        return decode(name, self._read(start_byte, length_bytes))

    def read_tensor(
        self, name: str, start_byte: int, length_bytes: int, size: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a tensor of a known size."""
        tensor = self.read_object(name, start_byte, length_bytes)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != size:
            got = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise CheckpointError(
                mismatch(
                    f"{name!r} in {self._path}",
                    expected=f"a tensor of shape {size}",
                    got=got,
                    fix="load another checkpoint: this one contradicts itself",
                )
            )
        return tensor

    def _read(self, start_byte: int, length_bytes: int) -> bytes:
        """Return some bytes of the file."""
        data = io.BytesIO()
        self._file.seek(start_byte)
        while data.tell() < length_bytes and (block := self._file.read(length_bytes - data.tell())):
            data.write(block)
        if data.tell() != length_bytes:
            raise CheckpointError(
                mismatch(
                    str(self._path),
                    expected=f"at least {start_byte + length_bytes} bytes",
                    got="fewer",
                    fix="load another checkpoint: this one was cut off",
                )
            )
        return data.getvalue()


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU whose memory holds nothing else."""
    value = tensor.detach().to("cpu", memory_format=torch.contiguous_format)
    is_apart = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return value.contiguous() if is_apart else value.contiguous().clone()
