"""What is known about a step, and the JSONL file that keeps it.

One JSON object a line; ``event`` says of which kind. Only the first rank writes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from _typeshed import DataclassInstance

METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, as all ranks know it."""

    step: int
    """From 1."""
    loss: float
    """Mean over the joined batch, nats per byte."""
    learning_rate: float
    grad_norm: float
    """Global norm before clipping."""
    loss_scale: float
    is_skipped: bool
    """Whether a gradient that is not finite made the ranks skip the update."""
    tokens: int
    """Tokens of the step over all ranks."""
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord:
    """The loss on text that is not trained on."""

    step: int
    """After so many steps."""
    loss: float
    """Nats per byte."""
    samples: int


class MetricsFile:
    """A JSONL file, or nothing where the run has no folder or this rank does not write.

    Every line is flushed, so that a run can be followed while it trains.
    """

    def __init__(self, folder: Path | None, *, is_resumed: bool = False) -> None:
        self._is_resumed = is_resumed
        self._path = None if folder is None else folder / METRICS_NAME
        self._file: TextIO | None = None

    def __enter__(self) -> MetricsFile:
        """Start an empty file, or go on with that of the run which is resumed."""
        if self._path is not None:
            self._file = self._path.open("a" if self._is_resumed else "w", encoding="utf-8")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def write(self, event: str, record: DataclassInstance) -> None:
        """Append one record as a line."""
        if self._file is None:
            return
        fields = dataclasses.asdict(record)
        if isinstance(record, StepRecord):
            fields["tokens_per_s"] = record.tokens_per_s
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()
