"""The learning rate over the steps: a linear warm-up, then half a cosine down to a floor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from torch.optim import Optimizer


def factor(step: int, *, steps: int, warmup_steps: int, final_fraction: float) -> float:
    """Return the share of the highest learning rate that a step uses.

    Args:
        step: Step, from 0.
        steps: Steps of the whole run.
        warmup_steps: Steps of the linear rise; the last of them uses the highest rate.
        final_fraction: Share that is left at the last step.

    Returns:
        A number from above 0 (0 only where ``final_fraction`` is) to 1.

    Example:
        >>> [round(factor(s, steps=5, warmup_steps=2, final_fraction=0.1), 3) for s in range(5)]
        [0.5, 1.0, 0.775, 0.325, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = max(steps - max(warmup_steps, 1), 1)
    done = min((step + 1 - max(warmup_steps, 1)) / decay_steps, 1.0)
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * done))


def warmup_then_cosine(
    optimizer: Optimizer, *, steps: int, warmup_steps: int, final_fraction: float
) -> LambdaLR:
    """Return a scheduler that sets every group's rate to its own highest one times ``factor``."""
    return LambdaLR(
        optimizer,
        lambda step: factor(
            step, steps=steps, warmup_steps=warmup_steps, final_fraction=final_fraction
        ),
    )
