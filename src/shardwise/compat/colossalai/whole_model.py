"""What enters and leaves a sharded module whole: state dicts with exact values.

Values are those that an optimizer updates: the float32 masters where parameters are 16-bit. One
chunk at a time is whole on an accelerator. It knows of no wrapper and of no optimizer.
"""

from __future__ import annotations

import warnings
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.errors import ConfigurationError, ShardwiseError, mismatch
from shardwise.options import HALF_DTYPES
from shardwise.runtime.agreement import fingerprints_agree
from shardwise.runtime.managed import ManagedParameter, record_of
from shardwise.shard import engine_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn.modules.module import _IncompatibleKeys

    from shardwise.runtime.engine import Engine

CPU = torch.device("cpu")


def is_first_rank(module: nn.Module) -> bool:
    """Return whether this rank is the first of those that a module is sharded over."""
    return all(axis.rank == 0 for axis in engine_of(module).topology.axes)


@torch.no_grad()
def whole_state(
    module: nn.Module, *, prefix: str, repeats_tied: bool, is_kept: bool
) -> OrderedDict[str, Any]:
    """Return a module's state under torch's names, on the CPU; empty where it is not kept.

    Parameters are at least float32; all else has the dtype that the module has it in.

    Args:
        module: A sharded module.
        prefix: Of every name.
        repeats_tied: Name a parameter at every place where the module has it, as torch does.
        is_kept: This rank wants the result.

    Collectives: an all-gather per chunk.
    """
    engine = engine_of(module)
    bring_to_rest(engine, "state_dict")
    found = module.state_dict(prefix=prefix, keep_vars=True)
    exact = exact_values(engine, is_kept=is_kept, device=CPU)
    state: OrderedDict[str, Any] = OrderedDict()
    if not is_kept:
        return state
    state.__dict__["_metadata"] = getattr(found, "_metadata", OrderedDict())
    copies: dict[int, torch.Tensor] = {}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            state[name] = value
            continue
        is_tied = id(value) in copies and isinstance(value, nn.Parameter)
        if is_tied and not repeats_tied:
            continue
        if id(value) not in copies:
            record = record_of(value)
            copies[id(value)] = exact[record] if record in exact else copied_to(value, CPU)
        state[name] = copies[id(value)]
    return state


@torch.no_grad()
def load_whole_state(
    module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool
) -> _IncompatibleKeys:
    """Load a whole state, the same on every rank; masters take its values unrounded.

    Raises:
        ConfigurationError: Ranks were given different states; on all ranks.
        RuntimeError: Torch's own, for names and shapes that do not fit. Nothing is changed.

    Collectives: one all-reduce of two numbers.
    """
    engine = engine_of(module)
    bring_to_rest(engine, "load_state_dict")
    _check_same_on_all_ranks(state_dict, engine)
    state_dict = _split(state_dict, module)
    without_axes = {name: _shell(v) for name, v in state_dict.items() if isinstance(v, DTensor)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
        # plain shells cannot be copied into from DTensors
        _stand_in(module).load_state_dict(_changed(state_dict, without_axes), strict=strict)
    result = module.load_state_dict(state_dict, strict=strict)
    if engine.residence is None:
        _write_exactly(module, state_dict, engine)
    return result


# ---------------------------------------------------------------------- values


def bring_to_rest(engine: Engine, call: str) -> None:
    """Finish updates in flight and take values that were written by hand into the masters."""
    if engine.residence is not None and engine.residence.gatherer.has_pins:
        raise ShardwiseError(
            mismatch(
                call,
                expected="a call outside forward and full_parameters",
                got="one inside",
                fix="leave full_parameters() first",
            )
        )
    engine.values.settle()
    engine.values.refresh_changed_masters()


def exact_values(
    engine: Engine, *, is_kept: bool, device: torch.device
) -> dict[ManagedParameter | None, torch.Tensor]:
    """Return whole copies of what is updated, at least float32. Collectives: see the callers."""
    values: dict[ManagedParameter | None, torch.Tensor] = {}
    for chunk in engine.chunks:
        buffer_C = engine.gather_update(chunk)
        for record in chunk.records if is_kept else ():
            view = record.view_in(buffer_C)
            place = view.device if isinstance(record.parameter, DTensor) else device
            values[record] = record.globalise(copied_to(view, place, widens=True))
    return values


def copied_to(
    tensor: torch.Tensor, device: torch.device, *, widens: bool | None = None
) -> torch.Tensor:
    """Return a copy on a device; 16-bit parameters become float32."""
    if widens is None:
        widens = isinstance(tensor, nn.Parameter)
    dtype = torch.float32 if widens and tensor.dtype in HALF_DTYPES else tensor.dtype
    return tensor.detach().to(device, dtype, copy=True)


# ---------------------------------------------------------------------- loading


def _check_same_on_all_ranks(state_dict: Mapping[str, Any], engine: Engine) -> None:
    """Raise on every rank where one was given other names or shapes."""
    described = [
        (name, tuple(value.shape)) if isinstance(value, torch.Tensor) else name
        for name, value in state_dict.items()
    ]
    text = repr(sorted(described, key=str)).encode()
    fingerprint = zlib.crc32(text) << 32 | zlib.adler32(text)
    topology = engine.topology
    if topology.size > 1 and not fingerprints_agree(fingerprint, topology):
        raise ConfigurationError(
            mismatch(
                "load_state_dict",
                expected="the same whole state on every rank",
                got=f"{len(described)} entries, which are not those of another rank",
                fix="load one file on every rank, or save with only_rank_0=False",
            )
        )


def _split(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Return a state in which whole values of DTensor parameters are DTensors. No collectives."""
    split: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(name)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
            continue
        if not isinstance(value, DTensor) and value.shape == parameter.shape:
            split[name] = distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
    return _changed(state_dict, split)


def _changed(
    state_dict: Mapping[str, Any], changes: Mapping[str, torch.Tensor]
) -> Mapping[str, Any]:
    """Return a state with some values replaced; it keeps the versions of its modules."""
    if not changes:
        return state_dict
    changed = OrderedDict({**state_dict, **changes})
    changed.__dict__["_metadata"] = getattr(state_dict, "_metadata", None)
    return changed


def _stand_in(module: nn.Module) -> nn.Module:
    """Return a module without values that loads like this one, hooks included, to no effect."""
    kind = type(module)
    if kind.set_extra_state is not nn.Module.set_extra_state:
        kind = type(kind.__name__, (kind,), {"set_extra_state": lambda self, state: None})
    double: nn.Module = object.__new__(kind)
    parameters, buffers, children = module._parameters, module._buffers, module._modules
    double.__dict__.update(
        module.__dict__,
        _parameters={
            name: p if p is None else nn.Parameter(_shell(p), False)
            for name, p in parameters.items()
        },
        _buffers={name: b if b is None else _shell(b) for name, b in buffers.items()},
        _modules={name: m if m is None else _stand_in(m) for name, m in children.items()},
        _load_state_dict_post_hooks=OrderedDict(),
    )
    return double


def _shell(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _write_exactly(module: nn.Module, state_dict: Mapping[str, Any], engine: Engine) -> None:
    """Repeat the writes of a load that has rounded values to those of resident parameters."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        record, value = record_of(parameter), state_dict.get(name)
        if record is None or not record.chunk.own.has_exact_master:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            continue
        local = record.localise(value)
        if torch.equal(local.to(record.values), record.values):  # else a hook has changed it
            engine.values.write(record, local.to(record.values.device))
