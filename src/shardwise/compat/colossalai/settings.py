"""Translate constructor arguments of the other library into settings of this one; no effects."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.compat.colossalai.groups import mesh_of
from shardwise.errors import ConfigurationError, mismatch
from shardwise.optimizer.binding import check_members
from shardwise.optimizer.setup import SetUp
from shardwise.options import FLOATING_DTYPES, LossScale, MixedPrecision
from shardwise.runtime.build import check_parameters

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What the constructor of ``LowLevelZeroOptimizer`` was given besides the optimizer."""

    partition_grad: bool
    reduce_bucket_size: int
    """Elements."""
    communication_dtype: torch.dtype | None
    cpu_offload: bool
    dp_process_group: dist.ProcessGroup | None
    sub_dp_size: int
    forced_dtype: torch.dtype | None
    master_weights: bool
    loss_scale: dict[str, float]
    """Fields of ``LossScale``, looked at for float16 only."""


def working_dtype(optimizer: torch.optim.Optimizer, forced: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the first parameter, as it will be.

    Raises:
        ConfigurationError: The dtype cannot hold gradients.
    """
    if forced is not None and forced not in FLOATING_DTYPES:
        raise _bad("forced_dtype", "a floating-point dtype or None", forced, "choose one")
    first = next((p.dtype for group in optimizer.param_groups for p in group["params"]), None)
    return forced or first or torch.get_default_dtype()


def make_set_up(optimizer: torch.optim.Optimizer, given: Arguments) -> SetUp:
    """Check everything that can be checked before ranks talk, then find the ranks.

    Raises:
        ConfigurationError: An argument, or the optimizer, cannot work.

    Collectives: see ``mesh_of``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _bad("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__, "make one")
    dtype = working_dtype(optimizer, given.forced_dtype)
    groups = check_members(optimizer)
    named = [
        (f"param_groups[{g}]['params'][{i}]", parameter)
        for g, group in enumerate(groups)
        for i, parameter in enumerate(group)
    ]
    device = check_parameters(named)
    if given.cpu_offload and device.type != "cpu":
        raise _bad(
            "cpu_offload",
            "False for parameters on an accelerator",
            True,
            "pass cpu_offload=False: masters and optimizer state are sharded over the ranks as it "
            "is; more ranks, or a larger group, hold less each",
        )
    bucket_numel = given.reduce_bucket_size
    if not isinstance(bucket_numel, int) or bucket_numel < 1:
        raise _bad("reduce_bucket_size", "a positive int", repr(bucket_numel), "count elements")
    is_scaled = dtype is torch.float16 or any(
        p.dtype is torch.float16 for _, p in named if given.forced_dtype is None
    )
    precision = MixedPrecision(
        reduce_dtype=given.communication_dtype,
        master_weights=given.master_weights,
        loss_scale=_loss_scale(given.loss_scale) if is_scaled else LossScale(),
    )
    return SetUp(
        stage=2 if given.partition_grad else 1,
        mesh=mesh_of(given.dp_process_group, given.sub_dp_size, device),
        mixed_precision=precision,
        chunk_bytes=bucket_numel * dtype.itemsize,
        leaves_stand_ins=False,
    )


@contextmanager
def rounded(parameters: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Generator[None]:
    """Cast floating-point parameters; cast nothing after all if the block inside raises."""
    before = [(p, p.data) for p in parameters if dtype is not None and p.is_floating_point()]
    for parameter, data in before:
        parameter.data = data.to(dtype)
    try:
        yield
    except BaseException:
        for parameter, data in before:
            parameter.data = data
        raise


def _loss_scale(fields: dict[str, float]) -> LossScale:
    """Return the loss scale of float16 training."""
    whole = {name: int(fields[name]) for name in ("growth_interval", "hysteresis")}
    return LossScale(
        initial_scale=float(fields["initial_scale"]),
        min_scale=float(fields["min_scale"]),
        max_scale=float(fields["max_scale"]),
        growth_factor=fields["growth_factor"],
        backoff_factor=fields["backoff_factor"],
        growth_interval=whole["growth_interval"],
        hysteresis=whole["hysteresis"],
    )


def _bad(what: str, expected: str, got: object, fix: str) -> ConfigurationError:
    """Return the error for an argument."""
    return ConfigurationError(mismatch(what, expected=expected, got=got, fix=fix))
