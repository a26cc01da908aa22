"""One plain process on the joined batch: what sharded training has to equal.

Plain torch, nothing of shardwise: the ranks' gradients are computed one after the other, added in
rank order and divided once, then torch's own AdamW steps. In 16 bits, the fp32 masters and the
16-bit weights that compute are two models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grad_norm_

from shardwise.cli.train.model import GPT, build_model, next_byte_loss
from shardwise.cli.train.recipe import DTYPES, adamw, passes, schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardwise.cli.train.config import TrainConfig
    from shardwise.cli.train.feed import Feed
    from shardwise.cli.train.interrupt import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a training run leaves: the loss of every step, and the parameters after the last."""

    losses: list[float]
    parameters: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummingOrder:
    """In which order sharded training adds gradients, so that one process can do the same."""

    passes: list[list[int]]
    """Micro-batches of a step, grouped by what one reduction over ranks covers."""
    shard_size: int
    """Ranks that are summed together first."""


def train_in_one_process(
    config: TrainConfig, feed: Feed, *, loss_scales: Sequence[float], stop: StopRequest
) -> Curve:
    """Train one plain process on the batches of all ranks.

    Args:
        config: The configuration that the ranks used, with a settled precision.
        feed: The batches; its world size says how many ranks are joined.
        loss_scales: What the loss is multiplied by before backward, one entry per step to train.
        stop: Ends it early.

    Returns:
        The losses, and the parameters that compute (in 16 bits: the rounded ones).
    """
    dtype = DTYPES[config.shard.precision]
    masters = build_model(config.model, sequence=feed.sequence, seed=feed.seed).to(feed.device)
    working = masters
    if dtype != torch.float32:
        working = build_model(config.model, sequence=feed.sequence, seed=feed.seed)
        working.to(device=feed.device, dtype=dtype)
    optimizer = adamw(masters.parameters(), config.optimizer)
    scheduler = schedule(optimizer, config)
    order = SummingOrder(
        passes=passes(config), shard_size=config.shard.shard_size or feed.world_size
    )
    losses: list[float] = []
    for step, scale in enumerate(loss_scales):
        if stop.signal:
            break
        loss, gradients = _joined_gradients(working, feed, order, step=step, scale=scale)
        losses.append(loss)
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            for master, gradient in zip(masters.parameters(), gradients, strict=True):
                master.grad = gradient
            if config.optimizer.clip_grad_norm:
                clip_grad_norm_(masters.parameters(), config.optimizer.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if working is not masters:
                _copy_parameters(masters, working)
        scheduler.step()
    parameters = {name: value.detach() for name, value in working.named_parameters()}
    return Curve(losses=losses, parameters=parameters)


def _joined_gradients(
    model: GPT, feed: Feed, order: SummingOrder, *, step: int, scale: float
) -> tuple[float, list[Tensor]]:
    """Return the mean loss over ranks, and the fp32 gradients of the joined batch.

    For every group of micro-batches that one reduction covers: rank by rank, summed, divided once.
    Hybrid sharding sums inside each shard group first, then over the groups. What is reduced is
    held in the dtype of the weights, as a rank holds its slice.
    """
    dtype = model.embedding.weight.dtype
    losses = [0.0] * feed.world_size
    sums: list[Tensor] = []
    for micros in order.passes:
        totals: list[Tensor] = []
        for first in range(0, feed.world_size, order.shard_size):
            group: list[Tensor] = []
            for rank in range(first, first + order.shard_size):
                losses[rank] += _rank_gradients(model, feed, micros, step, rank, scale)
                group = _add(group, _take_gradients(model))
            totals = _add(totals, group)
        means = [total.div_(feed.world_size) for total in totals]
        sums = _add(sums, means) if sums else [mean.to(dtype) for mean in means]
    loss = sum(loss / feed.accumulation for loss in losses) / feed.world_size
    return loss, [gradient.float().div_(scale) for gradient in sums]


def _take_gradients(model: GPT) -> list[Tensor]:
    """Return the gradients in fp32, and leave none."""
    gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def _rank_gradients(
    model: GPT, feed: Feed, micros: list[int], step: int, rank: int, scale: float
) -> float:
    """Leave one rank's gradients in ``.grad``, and return the sum of its losses."""
    losses: list[float] = []
    for micro in micros:
        batch = feed.micro_batch(step=step, micro=micro, rank=rank)
        loss = next_byte_loss(model(batch.inputs), batch.targets)
        (loss / feed.accumulation * scale).backward()
        losses.append(loss.item())
    return sum(losses)


def _add(totals: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Add gradients to totals in place; the first ones are the totals."""
    if not totals:
        return gradients
    return [total.add_(gradient) for total, gradient in zip(totals, gradients, strict=True)]


@torch.no_grad()
def _copy_parameters(source: GPT, target: GPT) -> None:
    """Round the masters into the weights that compute."""
    for master, weight in zip(source.parameters(), target.parameters(), strict=True):
        weight.copy_(master)
