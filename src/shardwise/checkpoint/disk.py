"""Every call that changes a file or a folder; nothing else in the package touches storage to write.

One place, so that a test can stop a save before and after each of them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_BYTES = 4096
"""What memory and places in a file are aligned to where the cache is bypassed."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP})


def make_folder(path: Path) -> None:
    """Make a folder that does not exist yet."""
    path.mkdir()


def make_parents(path: Path) -> None:
    """Make a folder and those above it, as far as they are missing."""
    path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> int:
    """Create a file that does not exist yet and return its descriptor."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)


def bypass_cache(descriptor: int, *, is_on: bool) -> bool:
    """Let writes go to the device without a copy in the kernel; False where that is not offered.

    Memory, start and length of writes must then be multiples of ``BLOCK_BYTES``.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    flags = flags | _DIRECT if is_on else flags & ~_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError:
        return False
    return bool(_DIRECT)


def write(descriptor: int, data: bytes | memoryview, start_byte: int) -> None:
    """Write all of ``data``; where writing past the cache is refused, by the cache."""
    rest = memoryview(data).cast("B")
    while len(rest):
        try:
            num_bytes = os.pwrite(descriptor, rest, start_byte)
        except OSError as error:
            is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)
            if error.errno != errno.EINVAL or not is_direct:
                raise
            bypass_cache(descriptor, is_on=False)
            continue
        rest, start_byte = rest[num_bytes:], start_byte + num_bytes


def cut(descriptor: int, length_bytes: int) -> None:
    """End a file after so many bytes."""
    os.ftruncate(descriptor, length_bytes)


def flush(descriptor: int) -> None:
    """Return when what was written is on the device."""
    os.fsync(descriptor)


def flush_folder(path: Path) -> None:
    """Return when the names in a folder are on the device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a folder another name, at once."""
    source.rename(target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders, at once; False where the system cannot, and then nothing happened."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one))


def remove_file(path: Path) -> None:
    """Remove a file if it is there."""
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it, as far as it is there; of a link the link alone."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def lock(descriptor: int) -> bool | None:
    """Take the lock of an open file.

    Returns:
        False where another process holds it, None where the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True
