"""One preallocated file without a name: whole reads and writes of aligned runs.

It knows neither blocks nor budgets. Past the page cache (O_DIRECT) where the file system can; one
that accepts the flag and refuses the call is read and written through the cache from then on.
"""

from __future__ import annotations

from errno import EDQUOT, EINVAL, ENOSPC
from typing import TYPE_CHECKING

from shardwise.errors import BudgetError, ConfigurationError, ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.tiers.file_calls import FileCalls

SECTOR_BYTES = 4096
"""What O_DIRECT needs addresses, offsets and lengths to be multiples of."""
_FULL = (ENOSPC, EDQUOT)


class DiskFile:
    """Space on one file system; reads and writes may come from several threads."""

    def __init__(self, folder: Path, *, calls: FileCalls, is_direct: bool) -> None:
        """Open an empty file in ``folder``, past the page cache if asked for and possible."""
        self.name = f"unnamed file in {folder}"
        self._calls = calls
        try:
            self._descriptor = calls.open_unnamed(folder)
        except OSError as error:
            raise ConfigurationError(
                mismatch(
                    "folder of the disk tier",
                    expected="an existing folder that files can be made in",
                    got=error,
                    where=str(folder),
                    fix="create the folder or name another",
                )
            ) from error
        self._is_direct = is_direct and self._try_direct()
        self._num_bytes = 0

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._is_direct

    @property
    def num_bytes(self) -> int:
        """Bytes reserved on the device."""
        return self._num_bytes

    def grow(self, num_bytes: int) -> None:
        """Reserve more room at the end.

        Raises:
            BudgetError: The device or the quota is full; the file is as long as it was.
            ShardwiseError: Any other failure; the file is as long as it was.
        """
        try:
            self._calls.reserve(self._descriptor, self._num_bytes, num_bytes)
        except OSError as error:
            self._calls.truncate(self._descriptor, self._num_bytes)  # it may have got a part
            raise self._failure(
                error, f"room for {num_bytes} bytes more", self._num_bytes
            ) from error
        self._num_bytes += num_bytes

    def read(self, offset: int, view: memoryview) -> None:
        """Fill ``view``, whose length and address are multiples of a sector, from ``offset``."""
        self._transfer(self._calls.read, offset, view, "read")

    def write(self, offset: int, view: memoryview) -> None:
        """Write all of ``view``, whose length and address are multiples of a sector."""
        self._transfer(self._calls.write, offset, view, "written")

    def close(self) -> None:
        """Close the file, which removes it."""
        self._calls.close(self._descriptor)

    def _transfer(
        self,
        call: Callable[[int, memoryview, int], int],
        offset: int,
        view: memoryview,
        verb: str,
    ) -> None:
        """Repeat a call until everything went through it."""
        done = 0
        while done < len(view):
            was_direct = self._is_direct
            try:
                count = call(self._descriptor, view[done:], offset + done)
            except OSError as error:
                # EINVAL: no such thing here after all, or a short call ended inside a sector
                if error.errno == EINVAL and was_direct:
                    self._stop_direct()
                    continue
                what = f"{len(view)} bytes to be {verb}"
                raise self._failure(error, what, offset) from error
            if count <= 0:
                raise ShardwiseError(
                    mismatch(
                        f"disk tier, {self.name}",
                        expected=f"{len(view)} bytes to be {verb} at offset {offset}",
                        got=done,
                        fix="look at the device and the system log",
                    )
                )
            done += count

    def _try_direct(self) -> bool:
        """Ask for O_DIRECT; return whether the file system has it."""
        try:
            self._calls.set_direct(self._descriptor, is_direct=True)
        except OSError:
            return False
        return True

    def _stop_direct(self) -> None:
        """Go through the page cache from now on; two threads may find out at once."""
        self._calls.set_direct(self._descriptor, is_direct=False)
        self._is_direct = False

    def _failure(self, error: OSError, what: str, offset: int) -> ShardwiseError:
        """Phrase an error of the operating system."""
        is_full = error.errno in _FULL
        where, fix = "", "look at the device and the system log"
        if is_full:
            where = f"{self._calls.free_bytes(self._descriptor)} bytes are free there"
            fix = "free space there, lower the disk budget or name another folder"
        text = mismatch(
            f"disk tier, {self.name}",
            expected=f"{what} at offset {offset}",
            got=error,
            where=where,
            fix=fix,
        )
        return BudgetError(text) if is_full else ShardwiseError(text)
