"""A small text that is the same everywhere, for tests that do not need real language."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LINES = 400


def make_text(folder: Path) -> Path:
    """Write a file of numbered lines, about 12 kB; every rank of a test may do so at once.

    A rank that reads must never find the file that another rank has just truncated, so the text
    appears by one rename.
    """
    file, own = folder / "text.txt", folder / f"text.{os.getpid()}.part"
    own.write_text("".join(f"line {n} says {n * n} twice\n" for n in range(LINES)), "utf-8")
    own.replace(file)
    return file
