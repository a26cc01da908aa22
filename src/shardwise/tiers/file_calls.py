"""The few calls of the operating system that a disk tier makes; tests put faults in their place.

Python repeats a call that a signal interrupted, so none of these ends early for that reason.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from errno import EINVAL, EISDIR, ENOENT, EOPNOTSUPP
from pathlib import Path
from typing import Protocol


class FileCalls(Protocol):
    """Each raises OSError, and counts in bytes."""

    def open_unnamed(self, folder: Path) -> int:
        """Return a descriptor of a new file in ``folder`` that no name leads to."""
        ...

    def set_direct(self, descriptor: int, *, is_direct: bool) -> None:
        """Read and write past the page cache from now on, or through it."""
        ...

    def reserve(self, descriptor: int, offset: int, num_bytes: int) -> None:
        """Take room on the device, so that a later write cannot find it full."""
        ...

    def free_bytes(self, descriptor: int) -> int:
        """Return how much room the file system has left for this process."""
        ...

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Set the file's length."""
        ...

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        """Read into ``view``; return how much was read, maybe less than asked for."""
        ...

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        """Write ``view``; return how much was written, maybe less than asked for."""
        ...

    def close(self, descriptor: int) -> None:
        """Close the file, which frees its room."""
        ...


class SystemFileCalls:
    """The operating system's own."""

    def open_unnamed(self, folder: Path) -> int:
        """Open a file without a name, so that even a killed process leaves nothing behind.

        Where the file system knows no such files a named, empty one is unlinked at once.
        """
        tmpfile = getattr(os, "O_TMPFILE", 0)  # Linux only
        if tmpfile:
            try:
                return os.open(folder, os.O_RDWR | tmpfile, 0o600)
            except OSError as error:
                # ENOENT: a kernel before O_TMPFILE took the folder for a file to create
                if error.errno not in (EOPNOTSUPP, EISDIR, EINVAL, ENOENT):
                    raise
        descriptor, path = tempfile.mkstemp(prefix="shardwise-", suffix=".tier", dir=folder)
        Path(path).unlink()
        return descriptor

    def set_direct(self, descriptor: int, *, is_direct: bool) -> None:
        """Set or clear O_DIRECT; EINVAL where the file system has no such thing."""
        direct = getattr(os, "O_DIRECT", 0)  # not on macOS
        if not direct:
            if is_direct:
                raise OSError(EINVAL, os.strerror(EINVAL))
            return
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        flags = flags | direct if is_direct else flags & ~direct
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)

    def reserve(self, descriptor: int, offset: int, num_bytes: int) -> None:
        """Call posix_fallocate, or lengthen the file where that does not exist."""
        allocate = getattr(os, "posix_fallocate", None)  # not on macOS
        if allocate is not None:
            try:
                allocate(descriptor, offset, num_bytes)
            except OSError as error:
                if error.errno not in (EOPNOTSUPP, EINVAL):
                    raise
            else:
                return
        os.ftruncate(descriptor, offset + num_bytes)

    def free_bytes(self, descriptor: int) -> int:
        """Call fstatvfs; quotas are not seen by it."""
        found = os.fstatvfs(descriptor)
        return found.f_bavail * found.f_frsize

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Call ftruncate."""
        os.ftruncate(descriptor, num_bytes)

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        """Call preadv, which lets other threads run."""
        return os.preadv(descriptor, [view], offset)

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        """Call pwritev, which lets other threads run."""
        return os.pwritev(descriptor, [view], offset)

    def close(self, descriptor: int) -> None:
        """Call close."""
        os.close(descriptor)
