"""Where a run continues, and when it saves: the trainer's calls to ``shardwise.save`` and ``load``.

The samples of a step are a function of the step, so the number of steps done is the position in
the data too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardwise as sw

if TYPE_CHECKING:
    from shardwise.cli.train.config import RunConfig
    from shardwise.cli.train.engine import Learner
    from shardwise.cli.train.ranks import Ranks


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, run: RunConfig, ranks: Ranks) -> None:
        """Save into ``run.checkpoint_dir``, or nowhere."""
        self._run = run
        self._ranks = ranks
        self._folder = None if run.checkpoint_dir is None else Path(run.checkpoint_dir)
        self.num_done = 0
        """Steps that the newest checkpoint has done."""

    def resume(self, learner: Learner) -> int:
        """Load the newest good checkpoint and return how many steps it has done; collective."""
        if self._folder is None or not self._run.resume:
            return 0
        found = self._ranks.share(sw.latest(self._folder) if self._ranks.is_first else None)
        if found is None:
            return 0
        extra = sw.load(found, learner.model, learner.optimizer)
        learner.scheduler.load_state_dict(extra["scheduler"])
        self.num_done = int(extra["step"])
        return self.num_done

    def after(self, step: int, learner: Learner, *, is_last: bool) -> None:
        """Save after a step if it is time to; collective."""
        every = self._run.save_every
        is_due = is_last or (every > 0 and step % every == 0)
        if self._folder is None or not is_due or step == self.num_done:
            return
        extra: dict[str, Any] = {"step": step, "scheduler": learner.scheduler.state_dict()}
        sw.save(
            self._folder / f"step-{step}",
            learner.model,
            learner.optimizer,
            extra=extra,
            keep_last=self._run.keep_last,
        )
        self.num_done = step
