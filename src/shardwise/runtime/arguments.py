"""Check what ``shardwise.shard`` is given, before anything is changed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigurationError, mismatch
from shardwise.options import MixedPrecision
from shardwise.runtime.managed import ATTRIBUTE
from shardwise.runtime.topology import PARAMETER_STAGE
from shardwise.runtime.units import Unit, find_units

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

MemberT = TypeVar("MemberT")


def listed(name: str, given: Iterable[MemberT], *, of: str) -> tuple[MemberT, ...]:
    """Return the members of an argument that must be iterable."""
    is_one = isinstance(given, torch.Tensor | type)
    try:
        members = None if is_one else tuple(given)
    except TypeError:
        members = None
    if members is None:
        got = given.__name__ if isinstance(given, type) else type(given).__name__
        raise _bad(name, f"an iterable of {of}", got, f"write {name}=[...]")
    return members


def check_arguments(
    module: nn.Module,
    mixed_precision: MixedPrecision | None,
    chunk_bytes: int | None,
    ignored: Sequence[object],
    gradient_reduction: str,
    init_fn: object,
) -> None:
    """Refuse arguments of the wrong kind."""
    if not isinstance(module, nn.Module):
        raise _bad("module", "a torch.nn.Module", type(module).__name__, "pass the model")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise _bad(
            "module",
            "a plain module",
            "DistributedDataParallel",
            "drop that wrapper: shardwise reduces gradients itself",
        )
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision):
        raise _bad(
            "mixed_precision",
            "a shardwise.MixedPrecision or None",
            repr(mixed_precision),
            "write MixedPrecision(param_dtype=...)",
        )
    if chunk_bytes is not None and (not isinstance(chunk_bytes, int) or chunk_bytes < 1):
        raise _bad("chunk_bytes", "a positive int or None", repr(chunk_bytes), "pass bytes")
    if init_fn is not None and not callable(init_fn):
        raise _bad("init_fn", "a function of a module, or None", repr(init_fn), "pass a function")
    if gradient_reduction not in ("mean", "sum"):
        raise _bad("gradient_reduction", "'mean' or 'sum'", repr(gradient_reduction), "choose one")
    own = set(module.parameters())
    others = [one for one in ignored if not isinstance(one, nn.Parameter) or one not in own]
    if others:
        raise _bad(
            "ignored",
            "parameters of the module",
            f"{len(others)} other objects",
            "pass nn.Parameter objects that module.parameters() yields",
        )
    if module.__dict__.get(ATTRIBUTE) is not None:  # a copy of a sharded module carries None
        raise _bad("module", "one that is not sharded yet", "a sharded one", "call shard once")


def check_tensor_parallel(
    named: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh | None
) -> None:
    """Refuse DTensor parameters without a data axis, or without values."""
    split = [parameter for _, parameter in named if isinstance(parameter, DTensor)]
    if mesh is None and split:
        raise _bad(
            "mesh",
            "the data-parallel axis of the mesh that the DTensor parameters lie on",
            "None",
            "pass mesh=mesh['dp']",
        )
    if any(parameter.is_meta for parameter in split):
        raise _bad(
            "module",
            "tensor-parallel parameters with values",
            "DTensors on the meta device",
            "call module.to_empty(device=...) and initialise it before sharding",
        )


def keep_bytes_of(reshard_after_forward: bool | int) -> float:
    """Return how many gathered bytes a forward pass may leave."""
    if reshard_after_forward is False:
        return math.inf
    return 0 if reshard_after_forward is True else reshard_after_forward


def units_of(
    module: nn.Module,
    stage: int,
    kinds: tuple[type[nn.Module], ...] | None,
    reshard_after_forward: bool | int,
) -> list[Unit]:
    """Return the units at stage 3; refuse settings that other stages have no use for."""
    if not isinstance(reshard_after_forward, int) or reshard_after_forward < 0:
        raise _bad(
            "reshard_after_forward",
            "True, False or a number of bytes",
            repr(reshard_after_forward),
            "pass one of them",
        )
    if stage != PARAMETER_STAGE:
        for name, is_given in (
            ("units", kinds is not None),
            ("reshard_after_forward", reshard_after_forward is not True),
        ):
            if is_given:
                raise _bad(
                    name, "nothing below stage 3", f"a setting at stage {stage!r}", "drop it"
                )
        return []
    if any(not (isinstance(kind, type) and issubclass(kind, nn.Module)) for kind in kinds or ()):
        raise _bad("units", "module classes", repr(kinds), "write units=[type(model.layers[0])]")
    return find_units(module, kinds)


def _bad(what: str, expected: str, got: str, fix: str) -> ConfigurationError:
    """Return the error for an argument."""
    return ConfigurationError(mismatch(what, expected=expected, got=got, fix=fix))
