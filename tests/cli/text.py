"""A small text that is the same everywhere, for tests that do not need real language."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LINES = 400


def make_text(folder: Path) -> Path:
    """Write a file of numbered lines, about 12 kB."""
    file = folder / "text.txt"
    file.write_text("".join(f"line {n} says {n * n} twice\n" for n in range(LINES)), "utf-8")
    return file
