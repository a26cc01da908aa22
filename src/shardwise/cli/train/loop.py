"""The training loop, in phases: gradients, update, agreement, report.

The agreement is one small all-gather a step: it joins the ranks' losses and carries the wish to
stop, so that all ranks end after the same step.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from shardwise.cli.train.metrics import StepRecord, ValidationRecord
from shardwise.cli.train.model import next_byte_loss
from shardwise.report import HeldBytes, held_bytes

if TYPE_CHECKING:
    from shardwise.cli.train.checkpoints import Checkpoints
    from shardwise.cli.train.config import RunConfig
    from shardwise.cli.train.engine import Learner
    from shardwise.cli.train.feed import Feed
    from shardwise.cli.train.interrupt import StopRequest
    from shardwise.cli.train.journal import Journal
    from shardwise.cli.train.ranks import Ranks


@dataclass(slots=True, kw_only=True)
class History:
    """What the loop leaves behind."""

    steps: list[StepRecord] = field(default_factory=list)
    validations: list[ValidationRecord] = field(default_factory=list)
    held: HeldBytes | None = None
    """Bytes that this rank holds: gradients just before an update, the rest just after it."""
    stop_signal: int = 0
    """What ended it early, 0 for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks know after a step."""

    loss: float
    """Mean of the ranks' losses, summed in rank order."""
    stop_signal: int
    """By which signal some rank was asked to stop; 0 for none."""


def train(  # noqa: PLR0913 - what a run consists of, each with a part of its own
    learner: Learner,
    feed: Feed,
    run: RunConfig,
    *,
    ranks: Ranks,
    stop: StopRequest,
    journal: Journal,
    checkpoints: Checkpoints,
) -> History:
    """Train up to ``run.steps`` steps or until asked to stop; collective, on all ranks.

    Continues after the steps that a checkpoint has done.
    """
    history = History()
    for step in range(checkpoints.num_done, run.steps):
        start_s = time.perf_counter()
        learning_rate = float(learner.scheduler.get_last_lr()[0])
        loss = accumulate_gradients(learner, feed, step=step, rank=ranks.rank)
        update(learner, history)
        agreed = agree(loss, ranks=ranks, stop=stop, device=feed.device)
        record = StepRecord(
            step=step + 1,
            loss=agreed.loss,
            learning_rate=learning_rate,
            grad_norm=float(learner.optimizer.grad_norm),
            loss_scale=float(learner.optimizer.loss_scale),
            is_skipped=learner.optimizer.last_step_skipped,
            tokens=feed.step_tokens,
            step_s=time.perf_counter() - start_s,
        )
        history.steps.append(record)
        journal.step(record)
        is_last = bool(agreed.stop_signal) or step + 1 == run.steps
        checkpoints.after(step + 1, learner, is_last=is_last)
        if agreed.stop_signal:
            history.stop_signal = agreed.stop_signal
            break
        if step + 1 == run.steps or (run.validate_every and (step + 1) % run.validate_every == 0):
            validation = validate(
                learner, feed, ranks=ranks, step=step + 1, total=run.validation_samples
            )
            history.validations.append(validation)
            journal.validation(validation)
    return history


def accumulate_gradients(learner: Learner, feed: Feed, *, step: int, rank: int) -> float:
    """Run every micro-batch forward and backward; return this rank's mean loss."""
    losses: list[float] = []
    for micros in learner.passes:
        for micro in micros:
            is_reduced = micro == micros[-1]
            batch = feed.micro_batch(step=step, micro=micro, rank=rank)
            with nullcontext() if is_reduced else learner.optimizer.no_sync():
                loss = next_byte_loss(learner.model(batch.inputs), batch.targets)
                learner.optimizer.backward(loss / feed.accumulation)
            losses.append(loss.item())
    return sum(losses) / len(losses)


def update(learner: Learner, history: History | None = None) -> None:
    """Step the optimizer and the schedule and drop the gradients, measuring once on the way."""
    is_measured = history is None or history.held is not None
    before = None if is_measured else held_bytes(learner.model, learner.optimizer)
    learner.optimizer.step()
    if history is not None and before is not None and not learner.optimizer.last_step_skipped:
        after = held_bytes(learner.model, learner.optimizer)
        history.held = HeldBytes(
            parameters=after.parameters,
            gradients=before.gradients,
            optimizer_state=after.optimizer_state,
            host=after.host,
            disk=after.disk,
        )
    learner.scheduler.step()
    learner.optimizer.zero_grad()


def agree(loss: float, *, ranks: Ranks, stop: StopRequest, device: torch.device) -> Agreement:
    """Join the ranks' losses and wishes to stop; one small all-gather, on all ranks."""
    everyone = ranks.gather([loss, float(stop.signal)], device=device)
    stop_signal = int(max(numbers[1] for numbers in everyone))
    stop.adopt(stop_signal)
    return Agreement(
        loss=sum(numbers[0] for numbers in everyone) / len(everyone), stop_signal=stop_signal
    )


@torch.no_grad()
def validate(
    learner: Learner, feed: Feed, *, ranks: Ranks, step: int, total: int
) -> ValidationRecord:
    """Compute the loss of ``total`` fixed validation samples, shared out over the ranks.

    Every rank runs the model equally often, whether or not the samples divide evenly; collective.
    """
    learner.model.eval()
    loss_sum = 0.0
    share = ranks.world_size * feed.samples
    for start in range(0, total, share):
        first = start + ranks.rank * feed.samples
        batch = feed.validation_batch(first=first, total=total)
        logits = learner.model(batch.inputs).float()
        losses = F.cross_entropy(logits.mT, batch.targets, reduction="none").mean(dim=1)
        loss_sum += losses[: max(total - first, 0)].sum().item()
    learner.model.train()
    everyone = ranks.gather([loss_sum], device=feed.device)
    return ValidationRecord(
        step=step, loss=sum(numbers[0] for numbers in everyone) / total, samples=total
    )
