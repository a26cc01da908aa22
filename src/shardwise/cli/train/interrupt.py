"""Ctrl-C as a wish: remembered at once, granted by all ranks together at the end of a step.

It does not decide for the others: the loop sends the wish round with each step's loss.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

EXIT_CODE: Final = 130
"""What a shell expects of a command that ended by Ctrl-C: 128 + SIGINT."""


class StopRequest:
    """Remembers SIGINT while it is entered; a second one ends the process the usual way.

    Example:
        >>> with StopRequest() as stop:
        ...     stop.is_requested
        False
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Callable[[int, FrameType | None], Any] | int | None = signal.SIG_DFL

    def __enter__(self) -> StopRequest:
        """Take SIGINT over."""
        self._previous = signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give SIGINT back."""
        signal.signal(signal.SIGINT, self._previous)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        """Note the wish; the next SIGINT raises KeyboardInterrupt."""
        del number, frame
        self.is_requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
