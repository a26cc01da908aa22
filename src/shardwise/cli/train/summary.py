"""What a run leaves for people and for programs: the last lines, report.md and summary.json."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.cli.train.engine import mixed_precision
from shardwise.cli.train.metrics import METRICS_NAME
from shardwise.cli.train.settings import flatten
from shardwise.cli.train.table import HEADINGS, LEGEND, cells, mib
from shardwise.cli.train.tiers import HEADINGS as TIER_HEADINGS
from shardwise.cli.train.tiers import cells as tier_cells
from shardwise.report import closed_form

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.cli.train.config import TrainConfig
    from shardwise.cli.train.loop import History
    from shardwise.cli.train.parity import ParityResult
    from shardwise.cli.train.sample import Sample
    from shardwise.cli.train.table import MemoryRow
    from shardwise.cli.train.tiers import TierRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that is worth knowing after a run."""

    config: TrainConfig
    world_size: int
    num_parameters: int
    corpus: str
    """What text was trained on."""
    history: History
    memory: list[MemoryRow]
    tiers: list[TierRow]
    """Of a run with budgets."""
    peak_bytes: list[int]
    """Per rank."""
    parity: list[ParityResult]
    sample: Sample | None

    @property
    def tokens_per_s(self) -> float:
        """Median over the steps, all ranks together."""
        return statistics.median(record.tokens_per_s for record in self.history.steps)


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Return the short report as pairs of a name and a text."""
    steps, validations = summary.history.steps, summary.history.validations
    held = [
        ("steps", f"{steps[-1].step} of {summary.config.run.steps}"),
        (
            "training loss",
            f"{steps[0].loss:.3f} at step {steps[0].step}, {steps[-1].loss:.3f} at the last step",
        ),
    ]
    if validations:
        held.append(("validation loss", f"{validations[-1].loss:.3f} nats per byte"))
    skipped = sum(record.is_skipped for record in steps)
    if skipped:
        held.append(("skipped steps", f"{skipped} (a gradient was not finite)"))
    held.append(("speed", f"{summary.tokens_per_s:,.0f} tokens/s over all ranks (median step)"))
    peaks = ", ".join(mib(peak) for peak in summary.peak_bytes)
    held.append(("peak memory", f"{peaks} (whole process, by rank)"))
    return held


def state_line(summary: Summary) -> str:
    """Return one sentence on what a rank has to hold by arithmetic, beside its budget."""
    shard = summary.config.shard
    total_bytes = closed_form(
        summary.num_parameters,
        stage=shard.stage,
        shard_size=shard.shard_size or summary.world_size,
        mixed_precision=mixed_precision(shard.precision),
    ).total
    line = f"parameters, gradients and optimizer state of a rank: {mib(total_bytes)}"
    limit_bytes = summary.tiers[0].limit_bytes
    if limit_bytes:
        line += f", {total_bytes / limit_bytes:.1f} times the accelerator's budget"
    return line


def parity_line(result: ParityResult) -> str:
    """Return one sentence on a comparison with one plain process."""
    bits = "bit-equal" if result.is_bit_equal else "not bit-equal"
    allowed = (
        "equal bits required"
        if result.loss_tolerance == 0.0
        else f"loss tolerance {result.loss_tolerance:g}"
    )
    return (
        f"{result.name}, {result.steps} step(s): losses differ by at most "
        f"{result.max_loss_difference:.1e}, parameters {bits} (largest difference "
        f"{result.max_parameter_difference:.1e}); {allowed}: {result.reason}"
    )


def write(folder: Path, summary: Summary) -> None:
    """Write ``summary.json`` and ``report.md`` into the run's folder."""
    text = json.dumps(as_json(summary), indent=2)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.md").write_text(as_markdown(summary), encoding="utf-8")


def as_json(summary: Summary) -> dict[str, object]:
    """Return the summary as plain values; the curve of all steps is in the metrics file."""
    steps, validations = summary.history.steps, summary.history.validations
    return {
        "config": flatten(summary.config),
        "world_size": summary.world_size,
        "num_parameters": summary.num_parameters,
        "corpus": summary.corpus,
        "is_interrupted": summary.history.stop_signal > 0,
        "num_steps": len(steps),
        "first_loss": steps[0].loss,
        "last_loss": steps[-1].loss,
        "validation_loss": validations[-1].loss if validations else None,
        "tokens_per_s": summary.tokens_per_s,
        "peak_bytes": summary.peak_bytes,
        "tiers": [dataclasses.asdict(row) for row in summary.tiers],
        "memory": [dataclasses.asdict(row) for row in summary.memory],
        "parity": [
            {**dataclasses.asdict(result), "has_passed": result.has_passed}
            for result in summary.parity
        ],
        "sample": None if summary.sample is None else dataclasses.asdict(summary.sample),
    }


def as_markdown(summary: Summary) -> str:
    """Return the report as a page."""
    lines = [
        "# Training run",
        "",
        f"{summary.num_parameters:,} parameters, {summary.world_size} rank(s), stage "
        f"{summary.config.shard.stage}, {summary.config.shard.precision}; {summary.corpus}.",
        "",
        *(f"- {name}: {text}" for name, text in facts(summary)),
        f"- metrics: `{METRICS_NAME}`, configuration: `config.toml`",
    ]
    if summary.memory:
        lines += [
            "",
            "| " + " | ".join(HEADINGS) + " |",
            "|---|---:|---:|---:|---:|---:|",
            *("| " + " | ".join(cells(row)) + " |" for row in summary.memory),
            "",
            LEGEND,
        ]
    if summary.tiers:
        lines += [
            "",
            "| " + " | ".join(TIER_HEADINGS) + " |",
            "|---|---:|---:|---:|",
            *("| " + " | ".join(tier_cells(row)) + " |" for row in summary.tiers),
            "",
            state_line(summary),
        ]
    if summary.parity:
        lines += ["", "## Against one plain process on the joined batch", ""]
        lines += [f"- {parity_line(result)}" for result in summary.parity]
    if summary.sample is not None:
        lines += ["", "## Sample", "", "Prompt:", "", *_block(summary.sample.prompt)]
        lines += ["", "Written by the model:", "", *_block(summary.sample.text)]
    return "\n".join(lines) + "\n"


def _block(text: str) -> list[str]:
    """Indent a text so that Markdown shows it as it is."""
    return [f"    {line}" for line in text.splitlines()]
