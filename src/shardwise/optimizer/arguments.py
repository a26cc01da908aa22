"""Check what ``ShardedOptimizer`` and its methods are given, before anything is changed."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

from shardwise.errors import ConfigurationError, ShardwiseError, mismatch


def check_loss(loss: object) -> None:
    """Refuse a loss that has no gradient to give."""
    if not isinstance(loss, torch.Tensor):
        raise ConfigurationError(
            mismatch(
                "backward",
                expected="a scalar tensor",
                got=type(loss).__name__,
                fix="pass the loss that the model returned",
            )
        )


def check_clip(max_norm: float | None) -> float | None:
    """Return a clipping limit, or refuse one that is not a positive number."""
    if max_norm is None:
        return None
    limit = _number(max_norm)
    if not limit > 0:
        raise ConfigurationError(
            mismatch(
                "clip_grad_norm",
                expected="a positive number or None",
                got=repr(max_norm),
                fix="pass None not to clip",
            )
        )
    return limit


def check_weight(weight: float | None) -> float | None:
    """Return a weight as a number, or refuse one that cannot be one."""
    if weight is None:
        return None
    value = _number(weight)
    if not math.isfinite(value) or value < 0:
        raise ConfigurationError(
            mismatch(
                "backward(weight=)",
                expected="a finite number of at least 0",
                got=repr(weight),
                fix="pass how many tokens or samples the summed loss covers",
            )
        )
    return value


def check_shard_bytes(max_shard_bytes: int) -> int:
    """Return the size of a part of a state, or refuse one that nothing fits into."""
    if max_shard_bytes < 1:
        raise ConfigurationError(
            mismatch(
                "max_shard_bytes", expected="at least 1", got=max_shard_bytes, fix="pass bytes"
            )
        )
    return max_shard_bytes


def check_dict(what: str, given: object, *, fix: str) -> dict[str, Any]:
    """Return a dict, or refuse anything else."""
    if not isinstance(given, dict):
        raise ConfigurationError(
            mismatch(what, expected="a dict", got=type(given).__name__, fix=fix)
        )
    return given


def copy_refusal(what: str) -> ShardwiseError:
    """Return the error for a copy of an optimizer, which would update the same chunks."""
    return ShardwiseError(
        mismatch(
            what,
            expected="a plain optimizer",
            got="a ShardedOptimizer",
            fix="save state_dict() and load it into a new one over the copied model",
        )
    )


def _number(value: object) -> float:
    """Return a number or the only element of a tensor, nan for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else math.nan
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
