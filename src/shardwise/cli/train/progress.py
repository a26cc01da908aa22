"""What a person sees while it trains: a bar on a terminal, a line now and then elsewhere.

Ranks other than the first get a quiet console and therefore show nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from shardwise.cli.train.metrics import StepRecord, ValidationRecord

NUM_PLAIN_LINES = 20
"""About so many lines tell of a whole run where there is no terminal."""


class TrainingProgress:
    """Shows steps, loss and tokens per second while it is entered."""

    def __init__(self, console: Console, *, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._every = max(1, steps // NUM_PLAIN_LINES)
        self._is_live = console.is_terminal and not console.quiet
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self._is_live,
        )
        self._task = self._bar.add_task("training", total=steps, status="")

    def __enter__(self) -> TrainingProgress:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        status = f"loss {record.loss:.3f}  {record.tokens_per_s:,.0f} tokens/s"
        if self._is_live:
            self._bar.update(self._task, completed=record.step, status=status)
        elif record.step in (1, self._steps) or record.step % self._every == 0:
            detail = f"lr {record.learning_rate:.2e}  norm {record.grad_norm:.2f}"
            skipped = "  skipped" if record.is_skipped else ""
            self._console.print(
                f"step {record.step:>5}/{self._steps}  {status}  {detail}{skipped}", highlight=False
            )

    def validation(self, record: ValidationRecord) -> None:
        """Show a validation above the bar."""
        self._console.print(
            f"step {record.step:>5}/{self._steps}  validation loss {record.loss:.3f}",
            highlight=False,
        )
