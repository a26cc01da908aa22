"""The operating system's file calls with faults in chosen places."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.tiers.file_calls import FileCalls, SystemFileCalls

if TYPE_CHECKING:
    from pathlib import Path

Fault = Callable[..., Any]
"""Called with the real calls and the arguments in place of one call."""


class FaultyFileCalls:
    """Passes calls on, except those that have a fault."""

    def __init__(self, **faults: Fault) -> None:
        """Put each fault in place of the call of that name; ``faults`` may change later."""
        self.faults = faults
        self.num_calls: dict[str, int] = {}
        self._real: FileCalls = SystemFileCalls()

    def open_unnamed(self, folder: Path) -> int:
        return self._call("open_unnamed", folder)

    def set_direct(self, descriptor: int, *, is_direct: bool) -> None:
        self._call("set_direct", descriptor, is_direct=is_direct)

    def reserve(self, descriptor: int, offset: int, num_bytes: int) -> None:
        self._call("reserve", descriptor, offset, num_bytes)

    def free_bytes(self, descriptor: int) -> int:
        return self._call("free_bytes", descriptor)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        self._call("truncate", descriptor, num_bytes)

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        return self._call("read", descriptor, view, offset)

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        return self._call("write", descriptor, view, offset)

    def close(self, descriptor: int) -> None:
        self._call("close", descriptor)

    def _call(self, name: str, *arguments: object, **named: object) -> Any:
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        fault = self.faults.get(name)
        if fault is not None:
            return fault(self._real, *arguments, **named)
        return getattr(self._real, name)(*arguments, **named)


def failing_with(code: int) -> Fault:
    """Return a fault that always raises one error number."""

    def fault(*_: object, **__: object) -> None:
        raise OSError(code, f"injected error {code}")

    return fault
