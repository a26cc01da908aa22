"""Every way to shard optimizer state and gradients: what holds for one has to hold for all."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Literal

import shardwise as sw
from shardwise.compat.colossalai import LowLevelZeroOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

Face = Literal["module", "optimizer", "compatible"]
FACES: tuple[Face, ...] = ("module", "optimizer", "compatible")
"""`sw.shard`, `sw.ShardedOptimizer` alone, and the optimizer with another library's signature."""


def wrap(  # noqa: PLR0913 - one for each setting that faces share
    face: Face,
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    stage: int,
    param_dtype: torch.dtype | None = None,
    clip_grad_norm: float | None = None,
    chunk_numel: int | None = None,
    **loss_scale: Any,
) -> sw.ShardedOptimizer | LowLevelZeroOptimizer:
    """Shard a model's training state and return its optimizer.

    Args:
        face: Which way.
        model: Changed in place.
        make_optimizer: Makes any optimizer over the model's parameters.
        stage: 1 or 2.
        param_dtype: Dtype of the working parameters; None leaves them.
        clip_grad_norm: Largest norm.
        chunk_numel: Capacity of a chunk of float32 parameters.
        loss_scale: Fields of `sw.LossScale`.
    """
    inner = make_optimizer(list(model.parameters()))
    if face == "compatible":
        return LowLevelZeroOptimizer(
            inner,
            partition_grad=stage == 2,
            forced_dtype=param_dtype,
            clip_grad_norm=clip_grad_norm or 0.0,
            reduce_bucket_size=chunk_numel or 2**20,
            **loss_scale,
        )
    precision = None
    chunk_bytes = None if chunk_numel is None else 4 * chunk_numel
    if param_dtype is not None:
        scale = sw.LossScale(**loss_scale)
        precision = sw.MixedPrecision(param_dtype=param_dtype, loss_scale=scale)
    if face == "module":
        sw.shard(model, stage=stage, mixed_precision=precision, chunk_bytes=chunk_bytes)
        return sw.ShardedOptimizer(inner, clip_grad_norm=clip_grad_norm)
    return sw.ShardedOptimizer(
        inner,
        stage=stage,
        mixed_precision=precision,
        clip_grad_norm=clip_grad_norm,
        chunk_bytes=chunk_bytes,
    )


def for_each_cell(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for every `face` and `stage`, one after the other in the same ranks.

    A process for each would cost far more than the tests; a failure says which cell it is.
    """

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        for face in FACES:
            for stage in (1, 2):
                try:
                    test(face=face, stage=stage, **arguments)
                except BaseException as error:
                    error.add_note(f"in the cell {face=}, {stage=}")
                    raise

    signature = inspect.signature(test)
    kept = [p for name, p in signature.parameters.items() if name not in ("face", "stage")]
    run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return run
