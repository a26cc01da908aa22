"""Which samples a rank sees in a micro-batch: the corpus, seen through a run's settings.

It holds no state: any rank's batch of any step can be asked for by anyone, which is how one plain
process can train on the batches of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.cli.train.corpus import Batch, Corpus

if TYPE_CHECKING:
    import torch

    from shardwise.cli.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Hands out batches on the device that computes."""

    corpus: Corpus
    seed: int
    sequence: int
    samples: int
    """Samples per rank and micro-batch."""
    accumulation: int
    """Micro-batches per step."""
    world_size: int
    device: torch.device

    @classmethod
    def of(
        cls, config: TrainConfig, corpus: Corpus, *, world_size: int, device: torch.device
    ) -> Feed:
        """Return the feed of a run."""
        return cls(
            corpus=corpus,
            seed=config.run.seed,
            sequence=config.data.sequence,
            samples=config.run.batch,
            accumulation=config.run.accumulation,
            world_size=world_size,
            device=device,
        )

    @property
    def step_tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.world_size * self.accumulation * self.samples * self.sequence

    def micro_batch(self, *, step: int, micro: int, rank: int) -> Batch:
        """Return a rank's samples of one micro-batch."""
        batch = self.corpus.batch(
            seed=self.seed,
            step=step,
            part=micro * self.world_size + rank,
            parts=self.accumulation * self.world_size,
            sequence=self.sequence,
            samples=self.samples,
        )
        return self._here(batch)

    def validation_batch(self, *, first: int, total: int) -> Batch:
        """Return ``samples`` validation samples from ``first`` on."""
        batch = self.corpus.validation_batch(
            first=first, samples=self.samples, total=total, sequence=self.sequence
        )
        return self._here(batch)

    def _here(self, batch: Batch) -> Batch:
        """Move a batch to the device."""
        return Batch(inputs=batch.inputs.to(self.device), targets=batch.targets.to(self.device))
