"""Stop, fail or kill a save at any of its calls on files."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint import disk

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

CALLS = (
    "make_folder",
    "make_parents",
    "create",
    "write",
    "cut",
    "flush",
    "flush_folder",
    "rename",
    "exchange",
    "remove_file",
    "remove_folder",
    "lock",
)


@dataclass(slots=True)
class Counter:
    """How many calls were made."""

    num_calls: int = 0


@contextmanager
def watched(
    act: Callable[[int, str, tuple[Any, ...]], None] = lambda *_: None,
    *,
    after: Callable[[int, str], None] = lambda *_: None,
    has_exchange: bool = True,
) -> Generator[Counter]:
    """Call ``act`` before and ``after`` behind every call on a file.

    Args:
        act: Given the number of the call, its name and its arguments.
        after: Given the number of the call and its name.
        has_exchange: False stands for a file system that cannot exchange folders.
    """
    counter = Counter()
    originals = {name: getattr(disk, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            number, counter.num_calls = counter.num_calls, counter.num_calls + 1
            act(number, name, arguments)
            is_missing = name == "exchange" and not has_exchange
            result = False if is_missing else originals[name](*arguments)
            after(number, name)
            return result

        return call

    try:
        for name in CALLS:
            setattr(disk, name, wrap(name))
        yield counter
    finally:
        for name, original in originals.items():
            setattr(disk, name, original)


def die() -> None:
    """End this process as the machine's power does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(name: str, arguments: tuple[Any, ...]) -> None:
    """Die in the middle of a write, before anything else."""
    if name == "write":
        descriptor, data, start_byte = arguments
        disk.bypass_cache(descriptor, is_on=False)
        os.pwrite(descriptor, bytes(data)[: len(data) // 2], start_byte)
    die()


def fail(number: int) -> None:
    """Raise what the operating system raises: no space left, read-only file system, and so on."""
    raise OSError(number, os.strerror(number))


FAILURES = {"disk-full": errno.ENOSPC, "read-only": errno.EROFS, "device": errno.EIO}
