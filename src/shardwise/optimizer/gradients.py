"""Small checks and formulas about gradients that the optimizer's face needs."""

from __future__ import annotations

import math

from shardwise.errors import ConfigurationError, mismatch

CLIP_EPSILON = 1e-6
"""Added to the norm once, globally, as torch.nn.utils.clip_grad_norm_ does."""


def check_clip(max_norm: float | None) -> float | None:
    """Return a clipping limit, or refuse one that is not a positive number."""
    if max_norm is None:
        return None
    limit = float(max_norm)
    if not limit > 0:
        raise ConfigurationError(
            mismatch(
                "clip_grad_norm",
                expected="a positive number or None",
                got=max_norm,
                fix="pass None not to clip",
            )
        )
    return limit


def check_weight(weight: float | None) -> float | None:
    """Return a weight as a number, or refuse one that cannot be one."""
    if weight is None:
        return None
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise ConfigurationError(
            mismatch(
                "backward(weight=)",
                expected="a finite number of at least 0",
                got=weight,
                fix="pass how many tokens or samples the summed loss covers",
            )
        )
    return value


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return what gradients are multiplied by so that their norm is at most ``max_norm``."""
    return min(1.0, max_norm / (norm + CLIP_EPSILON))
