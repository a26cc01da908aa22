"""Run ``shardwise train`` as a person would: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN = (sys.executable, "-m", "shardwise.cli")
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "shardwise.cli",
)
TINY = ("--model", "tiny", "--batch", "2", "--sequence", "64")
TIMEOUT_S = 110
GRACE_S = 45
"""torchrun gives its ranks 30 seconds to end."""


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command without torchrun's variables of the test's own process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    return subprocess.Popen(
        list(command),
        env={**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(command: Sequence[str]) -> tuple[int, str, str]:
    """Run a command to its end; returns exit code, output, errors."""
    process = start(command)
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        _end(process)
    return process.returncode, output, errors


def _end(process: subprocess.Popen[str]) -> None:
    """End a command that hangs; a launcher is asked first, so that it takes its ranks along."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    process.kill()
