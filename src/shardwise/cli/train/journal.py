"""Where the loop tells what happened: into the metrics file and before a person's eyes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.cli.train.metrics import MetricsFile, StepRecord, ValidationRecord
    from shardwise.cli.train.progress import TrainingProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """Both places of news; on ranks other than the first, both are silent."""

    metrics: MetricsFile
    progress: TrainingProgress

    def step(self, record: StepRecord) -> None:
        """Tell of an optimizer step."""
        self.metrics.write("step", record)
        self.progress.step(record)

    def validation(self, record: ValidationRecord) -> None:
        """Tell of a validation."""
        self.metrics.write("validation", record)
        self.progress.validation(record)
