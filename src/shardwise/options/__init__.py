"""What a user may choose: frozen values, checked when they are made.

``precision``  dtypes of training and the scale of losses
``offload``    where bytes lie between uses, and how many each tier may hold
"""

from __future__ import annotations

from shardwise.options.offload import (
    AdaptiveOffload,
    Budget,
    Size,
    StaticOffload,
    resolve_bytes,
)
from shardwise.options.precision import (
    FLOATING_DTYPES,
    HALF_DTYPES,
    LossScale,
    MixedPrecision,
)

__all__ = [
    "FLOATING_DTYPES",
    "HALF_DTYPES",
    "AdaptiveOffload",
    "Budget",
    "LossScale",
    "MixedPrecision",
    "Size",
    "StaticOffload",
    "resolve_bytes",
]
