"""The proof before training: sharded training equals one plain process on the joined batch.

Two comparisons on fresh models. In fp32 without clipping the order of arithmetic is the same on
both sides, so every parameter has to be equal bit by bit. With the run's own precision and clipping
it is not (see ``_OWN_REASONS``), so the losses have to agree within a stated tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shardwise.cli.train.engine import build_learner
from shardwise.cli.train.loop import accumulate_gradients, agree, update
from shardwise.cli.train.reference import Curve, train_in_one_process

if TYPE_CHECKING:
    from shardwise.cli.train.config import TrainConfig
    from shardwise.cli.train.feed import Feed
    from shardwise.cli.train.interrupt import StopRequest
    from shardwise.cli.train.ranks import Ranks

OWN_STEPS_SHARE = 4
"""The comparison with the run's own settings takes one in so many of the steps asked for."""

_CLIPPING = "the norm is summed slice by slice, so the clipping factor may differ in its last bits"
_ROUNDING = "16-bit weights turn a difference in the last bits into a whole step of theirs"
_DEVICE = "the accelerator's kernels and collectives add in an order of their own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One comparison to make: which settings, how long, how strict."""

    name: str
    config: TrainConfig
    steps: int
    loss_tolerance: float
    """Largest difference of a step's loss, nats per byte; 0 asks for equal parameters too."""
    reason: str
    """Why the tolerance is what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """What a comparison found; the same on every rank but for the curves."""

    name: str
    steps: int
    loss_tolerance: float
    reason: str
    max_loss_difference: float
    max_parameter_difference: float
    is_bit_equal: bool
    """Whether every parameter is equal bit by bit after the last step."""
    sharded_losses: list[float]
    plain_losses: list[float]
    """Empty on ranks other than the first."""

    @property
    def has_passed(self) -> bool:
        """Whether the comparison met its own strictness."""
        if self.loss_tolerance == 0.0:
            return self.is_bit_equal and self.max_loss_difference == 0.0
        return self.max_loss_difference <= self.loss_tolerance


def comparisons(config: TrainConfig, device: torch.device) -> list[Comparison]:
    """Return what is compared for a run: exactly, then with the run's own settings if others.

    Args:
        config: The run, with a settled precision; ``run.check_parity`` says how many steps.
        device: Where it runs.
    """
    steps = config.run.check_parity
    exact = replace(
        config,
        shard=replace(config.shard, precision="fp32"),
        optimizer=replace(config.optimizer, clip_grad_norm=0.0),
    )
    is_ordered = device.type == "cpu"
    found = [
        Comparison(
            name="fp32 without clipping",
            config=exact,
            steps=steps,
            loss_tolerance=0.0 if is_ordered else 1e-3,
            reason="same arithmetic in the same order" if is_ordered else _DEVICE,
        )
    ]
    if exact != config:
        is_fp32 = config.shard.precision == "fp32"
        limit = config.optimizer.clip_grad_norm
        clipped = f"clipped at {limit:g}" if limit else "without clipping"
        found.append(
            Comparison(
                name=f"{config.shard.precision} {clipped}",
                config=config,
                steps=max(1, steps // OWN_STEPS_SHARE),
                loss_tolerance=1e-5 if is_fp32 else 1e-2,
                reason=_CLIPPING if is_fp32 else _ROUNDING,
            )
        )
    return found


def compare(
    comparison: Comparison, feed: Feed, *, ranks: Ranks, stop: StopRequest
) -> ParityResult | None:
    """Train both ways from the same seed and compare; collective, on all ranks.

    Rank 0 trains the plain process while the others wait. Nothing of it is left behind.

    Returns:
        What was found, the same verdict on all ranks; None if a rank was asked to stop.
    """
    sharded, loss_scales, is_stopped = _train_sharded(comparison, feed, ranks=ranks, stop=stop)
    if is_stopped:
        return None
    plain = Curve(losses=[], parameters={})
    numbers = [0.0, 0.0, 0.0]
    if ranks.is_first:
        plain = train_in_one_process(comparison.config, feed, loss_scales=loss_scales, stop=stop)
        numbers = _differences(sharded, plain)
    everyone = ranks.gather([*numbers, float(stop.signal)], device=feed.device)
    stop.adopt(int(max(row[-1] for row in everyone)))
    if any(row[-1] for row in everyone):
        return None
    loss_difference, parameter_difference, is_bit_equal, _ = everyone[0]
    return ParityResult(
        name=comparison.name,
        steps=comparison.steps,
        loss_tolerance=comparison.loss_tolerance,
        reason=comparison.reason,
        max_loss_difference=loss_difference,
        max_parameter_difference=parameter_difference,
        is_bit_equal=bool(is_bit_equal),
        sharded_losses=sharded.losses,
        plain_losses=plain.losses,
    )


def _train_sharded(
    comparison: Comparison, feed: Feed, *, ranks: Ranks, stop: StopRequest
) -> tuple[Curve, list[float], bool]:
    """Train sharded; return the curve, each step's loss scale, and whether it was stopped."""
    learner = build_learner(comparison.config, feed.device)
    losses: list[float] = []
    loss_scales: list[float] = []
    for step in range(comparison.steps):
        loss_scales.append(float(learner.optimizer.loss_scale))
        loss = accumulate_gradients(learner, feed, step=step, rank=ranks.rank)
        update(learner)
        agreed = agree(loss, ranks=ranks, stop=stop, device=feed.device)
        losses.append(agreed.loss)
        if agreed.stop_signal:
            return Curve(losses=losses, parameters={}), loss_scales, True
    names = {name for name, _ in learner.model.named_parameters()}
    parameters = {name: v for name, v in learner.model.state_dict().items() if name in names}
    return Curve(losses=losses, parameters=parameters), loss_scales, False


def _differences(sharded: Curve, plain: Curve) -> list[float]:
    """Return the largest difference of losses and of parameters, and whether bits are equal."""
    losses = [abs(a - b) for a, b in zip(sharded.losses, plain.losses, strict=False)]
    pairs = [(sharded.parameters[name], value) for name, value in plain.parameters.items()]
    distances = [float((a.double() - b.double()).abs().max()) for a, b in pairs]
    is_bit_equal = all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)
    return [max(losses, default=0.0), max(distances), float(is_bit_equal)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that -0.0 and NaN compare as what they are."""
    return tensor.detach().contiguous().view(torch.uint8)
