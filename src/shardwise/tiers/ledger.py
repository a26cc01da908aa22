"""Bytes of one tier: what is held, what was held at most, and what may be; from any thread."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.errors import BudgetError, ConfigurationError, ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Generator


class Ledger:
    """Counts to the byte, and refuses what is over the budget before anything is allocated."""

    def __init__(self, name: str, budget_bytes: int | None) -> None:
        """Hold nothing yet; a budget of None never refuses."""
        if budget_bytes is not None and budget_bytes < 0:
            raise ConfigurationError(
                mismatch(
                    f"budget of the {name} tier",
                    expected="at least 0 bytes, or None",
                    got=budget_bytes,
                    fix="pass the bytes that the tier may hold",
                )
            )
        self.name = name
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._allocated_bytes = 0
        self._peak_bytes = 0
        self._is_closed = False

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now."""
        return self._allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes held since the start or the last reset."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Let the high-water mark fall to what is held now."""
        with self._lock:
            self._peak_bytes = self._allocated_bytes

    @contextmanager
    def reservation(self, need_bytes: int, what: str) -> Generator[None]:
        """Hold bytes while the body allocates them; an error in the body gives them back.

        Args:
            need_bytes: Bytes that the tier will hold.
            what: What they are for, said in the error.

        Raises:
            BudgetError: They do not fit; nothing was changed.
            ShardwiseError: The tier is closed.
        """
        self._reserve(need_bytes, what)
        try:
            yield
        except BaseException:
            self.release(need_bytes)
            raise
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)

    def release(self, num_bytes: int) -> None:
        """Give bytes back."""
        with self._lock:
            self._allocated_bytes -= num_bytes

    def close(self) -> bool:
        """Refuse everything from now on; return False if that was so already."""
        with self._lock:
            was_open = not self._is_closed
            self._is_closed = True
        return was_open

    def _reserve(self, need_bytes: int, what: str) -> None:
        """Check and count in one step, so that two threads never share the last bytes."""
        with self._lock:
            if self._is_closed:
                raise ShardwiseError(
                    mismatch(
                        f"{self.name} tier",
                        expected="to be open",
                        got=f"a request for {what} after close()",
                        fix="allocate before the tier is closed",
                    )
                )
            limit_bytes = self.budget_bytes
            if limit_bytes is not None and self._allocated_bytes + need_bytes > limit_bytes:
                free_bytes = limit_bytes - self._allocated_bytes
                raise BudgetError(
                    mismatch(
                        f"{self.name} tier",
                        expected=f"at most {free_bytes} bytes, free of its {limit_bytes},",
                        got=f"{need_bytes} bytes",
                        where=what,
                        fix=f"free blocks first or raise the {self.name} budget",
                    )
                )
            self._allocated_bytes += need_bytes
