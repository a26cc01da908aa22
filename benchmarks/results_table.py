"""From measurements to the markdown table: medians, ratios, and what was measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

import shardwise
from benchmarks.contestants import BASELINE

MIB = 2**20
_GIB = 2**30

HEADER = (
    "| contestant | step, ms: median (min - max) | step / DDP: median (min - max) "
    "| held, MiB | peak, MiB | sent, MiB | least to send, MiB | loss |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Everything measured of one contestant."""

    name: str
    steps_s: list[float]
    """Mean step of each round, on the slower rank."""
    sent_bytes: int
    """Per rank and step, the least of all rounds: other processes only add to it."""
    least_sent_bytes: int
    """What an optimal algorithm sends, per rank and step."""
    held_bytes: int | None
    """Between steps, on the rank that holds most; None when not measured."""
    peak_bytes: int | None
    """At the height of a step; None when not measured."""
    loss: float
    """Of the last step on rank 0: contestants that train alike agree."""


def make_table(measurements: list[Measurement]) -> str:
    """Return one row for each contestant."""
    baseline = next((one for one in measurements if one.name == BASELINE), measurements[0])
    return "\n".join([HEADER, *(_make_row(one, baseline) for one in measurements)])


def _make_row(one: Measurement, baseline: Measurement) -> str:
    # Divided round by round: whatever slowed the machine in a round slowed both.
    ratios = [a / b for a, b in zip(one.steps_s, baseline.steps_s, strict=True)]
    cells = [
        one.name,
        _spread([1e3 * step_s for step_s in one.steps_s], "{:.0f}"),
        _spread(ratios, "{:.2f}"),
        _mib(one.held_bytes),
        _mib(one.peak_bytes),
        _mib(one.sent_bytes),
        _mib(one.least_sent_bytes),
        f"{one.loss:.4f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _spread(values: list[float], form: str) -> str:
    middle, least, most = (form.format(f(values)) for f in (median, min, max))
    return f"**{middle}** ({least} - {most})"


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:.0f}"


def describe_machine() -> str:
    """Say in one line what the numbers were measured on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{_processor_name()}, {os.cpu_count()} cores, {memory_bytes / _GIB:.0f} GiB, "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"shardwise {shardwise.__version__}, gloo over loopback"
    )


def machine_slug() -> str:
    """Name the machine in a file name."""
    letters = "".join(c if c.isalnum() else "-" for c in _processor_name().lower())
    name = "-".join(part for part in letters.split("-") if part not in {"", "r", "tm", "cpu"})
    return f"{name}-{os.cpu_count()}-cores"


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
