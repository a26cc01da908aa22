"""Bytes resident in this process, and the most since a mark (Linux).

Only meaningful when freed blocks go back to the system, which glibc does for large ones when
`MALLOC_MMAP_THRESHOLD_` is set before the process starts (`RETURN_FREED_BLOCKS`). That makes steps
slower, so memory and time are measured in different processes. Unlike a trace of torch's allocator
it also sees what other threads and the communication library allocate.
"""

from __future__ import annotations

from pathlib import Path

RETURN_FREED_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_TRIM_THRESHOLD_": "0"}
"""Environment for a process in which memory is measured."""

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return the bytes resident now."""
    return _read("VmRSS")


def reset_peak() -> None:
    """Mark from where `peak_resident_bytes` counts."""
    _CLEAR_REFS.write_text("5")


def peak_resident_bytes() -> int:
    """Return the most bytes resident since `reset_peak`."""
    return _read("VmHWM")


def _read(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    message = f"{_STATUS} has no {key}"
    raise RuntimeError(message)
