"""Errors of passes, steps and reads of parameters; when they are raised is not decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.errors import ShardwiseError, mismatch
from shardwise.runtime.absent import copy_refusal
from shardwise.runtime.operator_names import is_write, operator_name

if TYPE_CHECKING:
    from collections.abc import Callable

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


def absent_values(record: ManagedParameter, func: Callable[..., Any]) -> ShardwiseError:
    """Return the error for an operator that takes a released parameter while no unit runs."""
    fix = "read it inside shardwise.full_parameters(module) or in the module's forward"
    if is_write(func):
        fix = (
            "write it inside shardwise.full_parameters(module, writeback=True), or let a "
            "shardwise.ShardedOptimizer update it"
        )
    return ShardwiseError(
        mismatch(
            "copy.deepcopy or pickle" if func is copy_refusal else operator_name(func),
            expected="a parameter whose values are on this rank",
            got="one of which every rank holds a slice",
            where=record.name,
            fix=fix,
        )
    )
