"""What a stage holds per rank by arithmetic, before padding: the yardstick for what is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.report.held_bytes import HeldBytes
from shardwise.runtime.topology import PARAMETER_STAGE

if TYPE_CHECKING:
    from shardwise.options import MixedPrecision, StaticOffload

MASTER_BYTES = 4
"""A master is float32."""


def closed_form(  # noqa: PLR0913 - a keyword for each choice of the user
    numel: int,
    *,
    stage: int,
    shard_size: int,
    mixed_precision: MixedPrecision | None = None,
    num_moments: int = 2,
    buffer_bytes: int = 0,
    offload: StaticOffload | None = None,
) -> HeldBytes:
    r"""Return the bytes per rank of a model, its gradients and its optimizer state.

    With :math:`\Psi` elements, shard groups of :math:`N` ranks, :math:`p` bytes per parameter,
    :math:`g` per gradient and :math:`s` per element of optimizer state, the parameters take
    :math:`p\Psi` (at stage 3 :math:`p\Psi/N`), the gradients :math:`g\Psi` (from stage 2 on
    :math:`g\Psi/N`), and the state :math:`s\Psi` (from stage 1 on :math:`s\Psi/N`).

    Args:
        numel: Elements of all trainable parameters.
        stage: 0 to 3; stage 0 on any number of ranks is plain data parallelism.
        shard_size: Ranks in a shard group.
        mixed_precision: As passed to ``shardwise.shard``; without it everything is float32.
        num_moments: Tensors of optimizer state per parameter: Adam 2, SGD with momentum 1.
        buffer_bytes: Bytes of the model's buffers, which every rank holds whole.
        offload: As passed to ``shardwise.shard``; its fractions are taken as exact.

    Returns:
        The closed form, rounded up to whole bytes.

    Example:
        >>> closed_form(1000, stage=2, shard_size=2).total  # 4 + 4 / 2 + 8 / 2 bytes each
        10000

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models, 2020, section 5.
    """
    working = reduce = torch.float32
    has_masters = False
    if mixed_precision is not None:
        working = mixed_precision.param_dtype or working
        reduce = mixed_precision.reduce_dtype or working
        has_masters = mixed_precision.master_weights and working.itemsize < MASTER_BYTES
    moment_bytes = MASTER_BYTES if has_masters else working.itemsize
    state_bytes = num_moments * moment_bytes + (MASTER_BYTES if has_masters else 0)
    held = HeldBytes(
        parameters=_shared(numel * working.itemsize, shard_size if stage >= PARAMETER_STAGE else 1)
        + buffer_bytes,
        gradients=_shared(numel * reduce.itemsize, shard_size if stage >= 2 else 1),
        optimizer_state=_shared(numel * state_bytes, shard_size if stage >= 1 else 1),
    )
    if offload is None:
        return held
    copy_bytes = 0 if has_masters else _shared(numel * working.itemsize, shard_size)
    return _rest(held, offload, buffer_bytes=buffer_bytes, copy_bytes=copy_bytes)


def _rest(
    held: HeldBytes, offload: StaticOffload, *, buffer_bytes: int, copy_bytes: int
) -> HeldBytes:
    """Move what rests elsewhere.

    Args:
        held: Everything on the accelerator.
        offload: What rests elsewhere.
        buffer_bytes: What of the parameters stays.
        copy_bytes: Working slices of which an update elsewhere needs a copy: without masters. Those
            that rest there themselves need none, and take their state along.
    """
    parameters, state = offload.parameters, offload.optimizer
    if copy_bytes:
        state = max(state, parameters)
    resting_parameters = int(parameters * (held.parameters - buffer_bytes))
    resting_state = int(state * held.optimizer_state)
    gradients = int(state * held.gradients)
    resting = resting_parameters + resting_state + int((state - parameters) * copy_bytes)
    on_disk = offload.to == "disk"
    return HeldBytes(
        parameters=held.parameters - resting_parameters,
        gradients=held.gradients - gradients,
        optimizer_state=held.optimizer_state - resting_state,
        host=gradients + (0 if on_disk else resting),
        disk=resting if on_disk else 0,
    )


def _shared(num_bytes: int, ranks: int) -> int:
    """Divide among ranks, rounded up."""
    return -(-num_bytes // ranks)
