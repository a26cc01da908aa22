"""Errors around a backward pass and the step after it; when they are raised is not decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import ShardwiseError, mismatch

if TYPE_CHECKING:
    from shardwise.runtime.managed import ManagedParameter


def unfinished_backward(what: str) -> ShardwiseError:
    """Return the error for something on top of a backward pass that never ended."""
    return ShardwiseError(
        mismatch(
            what,
            expected="backward passes before it that have finished",
            got="one that ended in an error",
            fix="call optimizer.zero_grad() and repeat the step",
        )
    )


def bare_backward(record: ManagedParameter, reason: str) -> ShardwiseError:
    """Return the error for ``loss.backward()`` where the optimizer has to know of it."""
    return ShardwiseError(
        mismatch(
            "backward",
            expected="optimizer.backward(loss)",
            got="loss.backward()",
            where=record.name,
            fix=f"call optimizer.backward: {reason}",
        )
    )


def cast_parameter(record: ManagedParameter) -> ShardwiseError:
    """Return the error for a parameter whose dtype has changed."""
    return ShardwiseError(
        mismatch(
            f"parameter {record.name!r}",
            expected=record.chunk.dtype,
            got=record.parameter.dtype,
            fix="cast the module before sharding it, or use MixedPrecision",
        )
    )


def mixed_weights() -> ShardwiseError:
    """Return the error for gradients of which some are weighted."""
    return ShardwiseError(
        mismatch(
            "backward(weight=)",
            expected="a weight for all passes of a step on all ranks, or for none",
            got="both",
            fix="call zero_grad() and repeat the step, with weight= every time",
        )
    )
