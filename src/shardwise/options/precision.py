"""What a user may choose about precision: frozen values, checked when they are made.

It does not say how a choice is carried out: see ``shardwise.runtime``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from shardwise.errors import ConfigurationError, mismatch

HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOATING_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling; it takes effect only when parameters are float16.

    The scale falls by ``backoff_factor`` once ``hysteresis`` steps have overflowed since it last
    grew, and grows by ``growth_factor`` after ``growth_interval`` good steps in a row. Every step
    that overflows is skipped, whether or not the scale changes.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2.
    """

    initial_scale: float = 2.0**16
    """Scale of the first step."""
    growth_factor: float = 2.0
    """Factor of a growth, above 1."""
    backoff_factor: float = 0.5
    """Factor of a back-off, between 0 and 1."""
    growth_interval: int = 2000
    """Number of consecutive good steps before a growth."""
    hysteresis: int = 2
    """Number of overflows since the last growth before the scale backs off; 0 acts as 1."""
    min_scale: float = 1.0
    """The scale never falls below this."""
    max_scale: float = 2.0**24
    """The scale never rises above this."""

    def __post_init__(self) -> None:
        """Refuse settings that could never scale a loss."""
        rules = (
            ("min_scale", "a number above 0", self.min_scale > 0),
            (
                "max_scale",
                "a finite number of at least min_scale",
                self.max_scale >= self.min_scale,
            ),
            ("max_scale", "a finite number", math.isfinite(self.max_scale)),
            (
                "initial_scale",
                "a number between min_scale and max_scale",
                self.min_scale <= self.initial_scale <= self.max_scale,
            ),
            ("growth_factor", "a number above 1", self.growth_factor > 1),
            ("backoff_factor", "a number between 0 and 1", 0 < self.backoff_factor < 1),
            ("growth_interval", "at least 1", self.growth_interval >= 1),
            ("hysteresis", "at least 0", self.hysteresis >= 0),
        )
        for name, expected, holds in rules:
            if not holds:
                raise ConfigurationError(
                    mismatch(
                        f"LossScale.{name}",
                        expected=expected,
                        got=getattr(self, name),
                        fix="change that field",
                    )
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Which dtype each part of training is held, computed and communicated in.

    Example:
        >>> import torch
        >>> MixedPrecision(param_dtype=torch.bfloat16).master_weights
        True
    """

    param_dtype: torch.dtype | None = None
    """Dtype of the working parameters and of floating-point inputs; None keeps each parameter's
    own. Parameters of batch-norm modules keep their dtype, as their running statistics do."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent and accumulated over micro-batches; None is the
    parameter's dtype. Sums over ranks are formed in float32 whatever is sent."""
    output_dtype: torch.dtype | None = None
    """Dtype of floating-point outputs of the sharded module; None leaves them."""
    buffer_dtype: torch.dtype | None = None
    """Dtype of floating-point buffers; None leaves them."""
    master_weights: bool = True
    """Keep a float32 copy of 16-bit parameters, taken from the values before rounding, and update
    that; False updates the 16-bit values themselves."""
    loss_scale: LossScale = field(default_factory=LossScale)
    """Loss scaling of float16 training; without effect for other dtypes."""

    def __post_init__(self) -> None:
        """Refuse dtypes that cannot hold gradients."""
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in FLOATING_DTYPES:
                raise ConfigurationError(
                    mismatch(
                        f"MixedPrecision.{name}",
                        expected="float16, bfloat16, float32 or float64",
                        got=dtype,
                        fix="choose one of these or None",
                    )
                )
        if not isinstance(self.master_weights, bool):
            raise ConfigurationError(
                mismatch(
                    "MixedPrecision.master_weights",
                    expected="True or False",
                    got=repr(self.master_weights),
                    fix="pass a bool",
                )
            )
        if not isinstance(self.loss_scale, LossScale):
            raise ConfigurationError(
                mismatch(
                    "MixedPrecision.loss_scale",
                    expected="a shardwise.LossScale",
                    got=type(self.loss_scale).__name__,
                    fix="write LossScale(initial_scale=...)",
                )
            )
