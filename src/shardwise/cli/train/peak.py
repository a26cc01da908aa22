"""The highest memory of this process, as the operating system or the accelerator counts it.

That is everything: the interpreter, torch's code, activations, freed blocks the allocator keeps.
The table of held bytes is the measure of training state; this is the measure of what must fit.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Start counting anew, where the system allows; else the peak is that of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        try:
            _CLEAR.write_text("5", encoding="ascii")
        except OSError:
            return


def peak_bytes(device: torch.device) -> int:
    """Return the peak since the last reset: allocated on an accelerator, resident otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
