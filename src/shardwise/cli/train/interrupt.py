"""Ctrl-C and SIGTERM as a wish: remembered at once, granted by all ranks at the end of a step.

It does not decide for the others: the loop sends the wish round with each step's loss. SIGTERM is
what a scheduler sends before it takes a machine away, and a launcher when another rank is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

LAUNCHER: Final = "SHARDWISE_LAUNCHER"
"""Environment variable: process that started this one and waits for it, and the run's id."""
_RUN_ID: Final = "TORCHELASTIC_RUN_ID"
_SET_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def end_with_launcher() -> None:
    """Have SIGTERM sent to this process when its launcher ends, even if that was killed (Linux)."""
    launcher, _, run_id = os.environ.pop(LAUNCHER, "").partition(" ")  # not for our own children
    if not launcher or run_id != os.environ.get(_RUN_ID) or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it was gone before
        os.kill(os.getpid(), signal.SIGTERM)


def exit_code(number: int) -> int:
    """Return what a shell expects of a command that ended by a signal: 130 or 143."""
    return 128 + number


def name_of(number: int) -> str:
    """Return how people call a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopRequest:
    """Remembers SIGINT and SIGTERM while it is entered.

    A second SIGINT ends the process the usual way, and so does SIGTERM after SIGINT: a launcher
    answers a second Ctrl-C with it. SIGTERM after SIGTERM says nothing new: some schedulers send it
    to launcher and ranks alike, and the launcher passes it on.

    Example:
        >>> with StopRequest() as stop:
        ...     stop.signal
        0
    """

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal that came first, 0 for none."""
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> StopRequest:
        """Take the signals over."""
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def adopt(self, number: int) -> None:
        """Take over what ranks have agreed on: the signal that one of them got, 0 for none."""
        self.signal = max(self.signal, number)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        """Note the wish; the next SIGINT raises KeyboardInterrupt."""
        del frame
        if number == signal.SIGINT:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.signal = self.signal or number
        signal.signal(signal.SIGINT, signal.default_int_handler)
