"""Hashes of a file in blocks, so that ranks can share the work of checking it.

XXH3-128 finds every kind of damage that storage does, at the speed of memory. It is not
cryptographic: who can write a file can write another with the same hash. Whoever can write a
checkpoint can write its manifest too, so no plain hash in it would be a signature. Checkpoints of
earlier releases have one SHA-256 for a whole file.

Source: xxHash, Yann Collet, 2019 (github.com/Cyan4973/xxHash), by way of the xxhash package.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

XXH3, SHA256 = "xxh3_128", "sha256"
BLOCK_BYTES = 16 * 2**20
_READ_BYTES = 2 * 2**20
"""In so large steps one reader keeps a device as busy as several, and the processor less."""


class _Digest(Protocol):
    """A hash that is being made."""

    def update(self, data: memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


_KINDS: dict[str, Callable[[], _Digest]] = {XXH3: xxhash.xxh3_128, SHA256: hashlib.sha256}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """What one file must be."""

    length_bytes: int
    hashes: tuple[str, ...]
    """One for every block of the file."""
    kind: str = XXH3
    block_bytes: int = BLOCK_BYTES
    """Length of every block but the last."""

    def span(self, number: int) -> tuple[int, int]:
        """Return the first byte of a block, and the first that is behind it."""
        start = number * self.block_bytes
        return start, min(start + self.block_bytes, self.length_bytes)


class Hasher:
    """The hashes of a file that is being written from its beginning to its end."""

    def __init__(self) -> None:
        """Begin."""
        self._hashes: list[str] = []
        self._digest = xxhash.xxh3_128()
        self._open_bytes = 0
        """Of the block that is being hashed."""
        self._closed_bytes = 0

    def update(self, data: memoryview) -> None:
        """Take what comes next."""
        while len(data):
            taken = data[: BLOCK_BYTES - self._open_bytes]
            self._digest.update(taken)
            self._open_bytes += len(taken)
            data = data[len(taken) :]
            if self._open_bytes == BLOCK_BYTES:
                self._close_block()

    def finish(self) -> FileSum:
        """Return what the file must be."""
        if self._open_bytes:
            self._close_block()
        return FileSum(length_bytes=self._closed_bytes, hashes=tuple(self._hashes))

    def _close_block(self) -> None:
        """Note the hash of a block and begin the next."""
        self._hashes.append(self._digest.hexdigest())
        self._digest = xxhash.xxh3_128()
        self._closed_bytes += self._open_bytes
        self._open_bytes = 0


def hash_of(data: bytes | memoryview) -> str:
    """Return the hash of some memory."""
    return xxhash.xxh3_128_hexdigest(data)


def sum_of(data: bytes) -> FileSum:
    """Return what a file with this content must be."""
    hasher = Hasher()
    hasher.update(memoryview(data))
    return hasher.finish()


def first_wrong(descriptor: int, wanted: FileSum, blocks: Iterable[int]) -> int | None:
    """Return the first of some blocks of an open file that is not what it must be.

    Memory: two MiB.
    """
    memory = memoryview(bytearray(_READ_BYTES))
    for number in blocks:
        if _hash_block(descriptor, wanted, number, memory) != wanted.hashes[number]:
            return number
    return None


def _hash_block(descriptor: int, wanted: FileSum, number: int, memory: memoryview) -> str:
    """Return the hash of one block as it is, read by way of some memory."""
    start, end = wanted.span(number)
    digest = _KINDS[wanted.kind]()
    while start < end:
        num_bytes = os.preadv(descriptor, [memory[: end - start]], start)
        if num_bytes == 0:
            break  # it ends early: the hash will differ
        digest.update(memory[:num_bytes])
        start += num_bytes
    return digest.hexdigest()
