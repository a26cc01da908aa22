"""The table a run ends with: bytes per rank, measured, by closed form, and in plain training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.report import HeldBytes

CATEGORIES = ("parameters", "gradients", "optimizer_state")
ELSEWHERE = ("host", "disk")
HEADINGS = ("per rank", "measured", "closed form", "ratio", "plain DP", "saved")
LEGEND = (
    "measured: storages that are reachable, gradients just before an update, the rest just after "
    "it, the largest of the ranks; closed form: the arithmetic without padding; plain DP: data "
    "parallelism in fp32, where every rank holds everything"
)
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes of one category on one rank."""

    category: str
    measured_bytes: int
    """The largest of the ranks'."""
    closed_form_bytes: int
    """By arithmetic, without padding."""
    plain_bytes: int
    """In fp32 with every rank holding everything: plain data parallelism."""

    @property
    def share_of_plain(self) -> float:
        """What is held, as a share of plain data parallelism."""
        return self.measured_bytes / self.plain_bytes if self.plain_bytes else 0.0


def memory_rows(
    everyone: Sequence[Sequence[float]], *, expected: HeldBytes, plain: HeldBytes
) -> list[MemoryRow]:
    """Return a row per category, one for the total, and one for each other tier in use.

    Args:
        everyone: Per rank, the measured bytes of the categories in order, then on host and disk
            where known.
        expected: The closed form of the run.
        plain: The closed form of plain data parallelism.
    """
    largest = [int(max(column)) for column in zip(*everyone, strict=True)]
    rows = [
        MemoryRow(
            category=category.replace("_", " "),
            measured_bytes=measured,
            closed_form_bytes=getattr(expected, category),
            plain_bytes=getattr(plain, category),
        )
        for category, measured in zip(CATEGORIES, largest[: len(CATEGORIES)], strict=True)
    ]
    total = MemoryRow(
        category="total",
        measured_bytes=int(max(sum(row[: len(CATEGORIES)]) for row in everyone)),
        closed_form_bytes=expected.total,
        plain_bytes=plain.total,
    )
    elsewhere = [
        MemoryRow(
            category=f"at rest on {tier}",
            measured_bytes=measured,
            closed_form_bytes=getattr(expected, tier),
            plain_bytes=0,
        )
        for tier, measured in zip(ELSEWHERE, largest[len(CATEGORIES) :], strict=False)
        if measured
    ]
    return [*rows, total, *elsewhere]


def memory_table(rows: Sequence[MemoryRow], *, title: str) -> Table:
    """Return the rows as a table for the console."""
    table = Table(title=title, title_justify="left", title_style="bold", caption=LEGEND)
    table.caption_justify = "left"
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row), end_section=row.category in ("optimizer state", "total"))
    return table


def cells(row: MemoryRow) -> list[str]:
    """Return a row as text: MiB, a ratio, and the share that is saved."""
    ratio = row.measured_bytes / row.closed_form_bytes if row.closed_form_bytes else 1.0
    saved = f"{max(1.0 - row.share_of_plain, 0.0):.0%}" if row.plain_bytes else ""
    return [
        row.category,
        mib(row.measured_bytes),
        mib(row.closed_form_bytes),
        f"{ratio:.3f}",
        mib(row.plain_bytes),
        saved,
    ]


def mib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / MIB:.2f} MiB"
