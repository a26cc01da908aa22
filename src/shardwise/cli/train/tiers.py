"""The table of a run with budgets: what each tier has held, and what it may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

import shardwise as sw
from shardwise.cli.train.table import mib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from shardwise.report import MemoryReport

TIERS = ("accelerator", "host", "disk")
HEADINGS = ("per rank", "between steps", "high-water mark", "budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """Bytes of one tier on one rank, the largest of the ranks'."""

    tier: str
    held_bytes: int
    peak_bytes: int
    limit_bytes: int | None


def numbers(model: nn.Module) -> tuple[MemoryReport, list[float]]:
    """Return a report of this rank, and what the ranks tell each other of it."""
    report = sw.memory_report(model)
    uses = [report.accelerator, report.host, report.disk]
    held = [0.0 if use is None else float(use.held_bytes) for use in uses]
    return report, held + [0.0 if use is None else float(use.peak_bytes or 0) for use in uses]


def tier_rows(report: MemoryReport, everyone: Sequence[Sequence[float]]) -> list[TierRow]:
    """Return a row per tier, from the reports of all ranks."""
    largest = [int(max(column)) for column in zip(*everyone, strict=True)]
    uses = [report.accelerator, report.host, report.disk]
    return [
        TierRow(
            tier=tier,
            held_bytes=largest[index],
            peak_bytes=largest[len(TIERS) + index],
            limit_bytes=use.limit_bytes,
        )
        for index, (tier, use) in enumerate(zip(TIERS, uses, strict=True))
        if use is not None
    ]


def tier_table(rows: Sequence[TierRow], *, title: str) -> Table:
    """Return the rows as a table for the console."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: TierRow) -> list[str]:
    """Return a row as text."""
    limit = "none" if row.limit_bytes is None else mib(row.limit_bytes)
    return [row.tier, mib(row.held_bytes), mib(row.peak_bytes), limit]
