"""A file that is hashed while it is written, past the operating system's cache where it can be.

Data is collected in one of two aligned blocks. A full one is handed to a thread that writes it,
and hashed meanwhile; the other takes what comes next. The copy into the block is the only one, so
that writing costs the processor less than a cached write without a hash.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardwise.checkpoint import disk
from shardwise.checkpoint.hashes import Hasher

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.checkpoint.hashes import FileSum

BLOCK_BYTES = 2 * 2**20
"""Of each of the two blocks."""


class Stream:
    """A new file."""

    def __init__(self, path: Path) -> None:
        """Create it."""
        self._descriptor = disk.create(path)
        disk.bypass_cache(self._descriptor, is_on=True)
        self._hasher = Hasher()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardwise-write")
        self._blocks = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(2)]
        self._writing: list[Future[None] | None] = [None, None]
        self._used_bytes = 0
        """Of the block that is being filled, the first of the two."""
        self.length_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Take some bytes; the caller may reuse its memory afterwards."""
        rest = memoryview(data).cast("B")
        num_bytes = len(rest)
        while len(rest):
            taken = min(len(rest), BLOCK_BYTES - self._used_bytes)
            self._blocks[0][self._used_bytes : self._used_bytes + taken] = rest[:taken]
            rest = rest[taken:]
            self._used_bytes += taken
            self.length_bytes += taken
            if self._used_bytes == BLOCK_BYTES:
                self._send()
        return num_bytes

    def flush(self) -> None:
        """Do nothing: ``close`` does."""

    def close(self) -> FileSum:
        """Return what the file is, once all of it is on the device."""
        self._send()
        self._await_all()
        disk.cut(self._descriptor, self.length_bytes)
        disk.flush(self._descriptor)
        return self._hasher.finish()

    def release(self) -> None:
        """Close the file, written or not."""
        self._writer.shutdown()
        os.close(self._descriptor)

    def _send(self) -> None:
        """Write and hash what has been collected, and turn to the other block."""
        if self._used_bytes == 0:
            return
        block, start_byte = self._blocks[0], self.length_bytes - self._used_bytes
        padded = block[: -(-self._used_bytes // disk.BLOCK_BYTES) * disk.BLOCK_BYTES]
        writing = self._writer.submit(disk.write, self._descriptor, padded, start_byte)
        self._hasher.update(block[: self._used_bytes])
        self._used_bytes = 0
        self._writing = [self._writing[1], writing]
        self._blocks.reverse()
        if self._writing[0] is not None:  # the block that comes next may still be on its way
            self._writing[0].result()

    def _await_all(self) -> None:
        """Return when everything that was sent is written."""
        for writing in self._writing:
            if writing is not None:
                writing.result()
