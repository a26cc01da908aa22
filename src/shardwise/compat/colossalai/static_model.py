"""``get_static_torch_model``: a plain module with the values of a sharded one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.compat.colossalai.whole_model import (
    bring_to_rest,
    copied_to,
    exact_values,
    is_first_rank,
)
from shardwise.runtime.hooks import Hook
from shardwise.runtime.managed import ATTRIBUTE, record_of
from shardwise.shard import engine_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.compat.colossalai.zero_ddp import ZeroDDP


def get_static_torch_model(
    zero_ddp_model: ZeroDDP,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - the signature given
    dtype: torch.dtype = torch.float32,
    only_rank_0: bool = True,
) -> nn.Module:
    """Return a plain copy of the inner module: its class, unsharded, tied parameters tied.

    Args:
        zero_ddp_model: Stays as it is.
        device: Where the copy lies.
        dtype: Of its floating-point parameters, which are cast from the exact values. Buffers keep
            theirs.
        only_rank_0: On other ranks than the first the copy is on the meta device, without values.

    Collectives: an all-gather per chunk.

    Example:
        >>> from shardwise.compat.colossalai import ZeroDDP
        >>> model = ZeroDDP(nn.Linear(4, 2))
        >>> plain = get_static_torch_model(model)
        >>> type(plain).__name__, plain.weight.dtype
        ('Linear', torch.float32)
    """
    module = zero_ddp_model.module
    is_kept = not only_rank_0 or is_first_rank(module)
    return _plain_copy(module, device=torch.device(device), dtype=dtype, is_kept=is_kept)


@torch.no_grad()
def _plain_copy(
    module: nn.Module, *, device: torch.device, dtype: torch.dtype, is_kept: bool
) -> nn.Module:
    """Return an unsharded copy of a module; on the meta device where it is not kept.

    Args:
        module: A sharded module; unchanged.
        device: Where the copy lies.
        dtype: Of its floating-point parameters; buffers keep theirs.
        is_kept: This rank wants the values.

    Collectives: an all-gather per chunk.
    """
    engine = engine_of(module)
    bring_to_rest(engine, "get_static_torch_model")
    exact = exact_values(engine, is_kept=is_kept, device=device)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        if not is_kept:
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        else:
            record = record_of(parameter)
            value = exact[record] if record in exact else copied_to(parameter, device)
        value = value.to(dtype) if value.is_floating_point() else value
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        place = device if is_kept else torch.device("meta")
        memo[id(buffer)] = buffer.detach().to(place, copy=True)
    twin = copy.deepcopy(module, memo)
    _forget_sharding(module, twin)
    return twin


def _forget_sharding(module: nn.Module, twin: nn.Module) -> None:
    """Remove from a copy what sharding has added to the module, so that it can do without."""
    for part, copied in zip(module.modules(), twin.modules(), strict=True):
        copied.__dict__.pop(ATTRIBUTE, None)
        own = set(_own_hooks(part))
        for attribute, hooks in copied.__dict__.items():
            if "_hooks" in attribute and isinstance(hooks, dict):
                for key in own.intersection(hooks):
                    del hooks[key]


def _own_hooks(part: nn.Module) -> Iterator[int]:
    """Yield the keys of the hooks of sharding, which are unique over all kinds of hooks."""
    for attribute, hooks in part.__dict__.items():
        if attribute.endswith("_hooks") and isinstance(hooks, dict):
            for key, hook in hooks.items():
                if isinstance(getattr(hook, "hook", hook), Hook):
                    yield key
