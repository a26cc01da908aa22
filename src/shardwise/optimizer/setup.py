"""Decide whether a sharded module or the optimizer itself shards its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import BudgetError, ConfigurationError, mismatch
from shardwise.optimizer.arguments import check_dict
from shardwise.optimizer.atoms import Atom, atoms_of, choose_atom
from shardwise.optimizer.binding import Binding, check_members
from shardwise.runtime.build import PackingPolicy, check_parameters
from shardwise.runtime.engine import Engine
from shardwise.runtime.engine_options import EngineOptions
from shardwise.runtime.managed import record_of
from shardwise.runtime.offload import check_offload
from shardwise.runtime.repacking import repack
from shardwise.runtime.topology import PARAMETER_STAGE, make_topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.options import AdaptiveOffload, LossScale, MixedPrecision, StaticOffload


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """How to shard parameters that no sharded module manages."""

    stage: int | None
    """0, 1 or 2; None: every parameter must be managed already."""
    mesh: DeviceMesh | None = None
    """The ranks."""
    shard_size: int | None = None
    """Short form of the hybrid mesh."""
    mixed_precision: MixedPrecision | None = None
    """Dtypes and masters."""
    chunk_bytes: int | None = None
    """Capacity of a chunk."""
    offload: StaticOffload | AdaptiveOffload | None = None
    """What rests off the accelerator."""
    atom: Atom | None = None
    """What a cut may not split."""
    leaves_stand_ins: bool = True
    """Mark reduced gradients in ``parameter.grad``."""
    loss_scale: LossScale | None = None
    """Loss scaling; None takes that of the parameters' precision."""
    norm_type: float = 2.0
    """The p of the norm that a face clips to by itself."""

    def given(self) -> list[str]:
        """Return the names of settings that only matter for unmanaged parameters."""
        names = ("stage", "mesh", "shard_size", "mixed_precision", "chunk_bytes", "offload")
        return [name for name in names if getattr(self, name) is not None]


def set_up(optimizer: torch.optim.Optimizer, options: SetUp) -> Binding:
    """Check an optimizer and bind its parameters to engines; pieces are not made yet.

    Raises:
        ConfigurationError: Before anything is changed.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            mismatch(
                "optimizer",
                expected="an instance of torch.optim.Optimizer",
                got=repr(optimizer)[:80],
                fix="write ShardedOptimizer(torch.optim.AdamW(model.parameters(), ...))",
            )
        )
    if isinstance(getattr(optimizer, "_binding", None), Binding):
        raise ConfigurationError(
            mismatch(
                "optimizer",
                expected="a plain optimizer",
                got="a ShardedOptimizer",
                fix="wrap it once",
            )
        )
    atom = choose_atom(optimizer, options.atom)
    groups = check_members(optimizer)
    parameters = [parameter for group in groups for parameter in group]
    made: Engine | None = None
    if any(record_of(parameter) is not None for parameter in parameters):
        _check_managed(parameters, options)
        _check_atoms(parameters, atom)
    else:
        _check_stage(options)
        made = _make_engine(parameters, _names(groups), atom, options)
    binding = Binding(optimizer)
    for group in groups:
        binding.add_group(group)
    try:
        binding.reserve_state()
    except BudgetError:
        if made is not None:
            _undo(made)
        raise
    binding.claim()
    return binding


def bind_group(
    optimizer: torch.optim.Optimizer, binding: Binding, param_group: dict[str, Any], options: SetUp
) -> None:
    """Check and add one group to the optimizer and its binding."""
    parameters = _new_members(binding, param_group)
    atom = choose_atom(optimizer, options.atom)
    unmanaged = [p for p in parameters if record_of(p) is None]
    made: Engine | None = None
    if options.stage is None:
        engines = binding.engines()
        _check_foreign(unmanaged, engines)
        _check_atoms(parameters, atom)
    elif unmanaged:
        check_parameters(
            [(f"group {len(binding.groups)}: {i}", p) for i, p in enumerate(unmanaged)]
        )
    optimizer.add_param_group({**param_group, "params": list(parameters)})
    if options.stage is not None and unmanaged:
        names = [f"group {len(binding.groups)}: {i}" for i in range(len(unmanaged))]
        try:
            made = _make_engine(unmanaged, names, atom, options)
        except BaseException:
            optimizer.param_groups.pop()
            raise
    binding.add_group(parameters)
    try:
        binding.reserve_state()
    except BudgetError:
        optimizer.param_groups.pop()
        binding.groups.pop()
        if made is not None:
            _undo(made)
        raise
    binding.claim()


class _NoFace:
    """Stands for the optimizer that could not be made."""

    __slots__ = ("__weakref__",)


def _undo(engine: Engine) -> None:
    """Make parameters plain again that were sharded for an optimizer alone."""
    face = _NoFace()
    engine.serve(face)
    del face  # the last one that uses them


def _new_members(binding: Binding, param_group: dict[str, Any]) -> list[nn.Parameter]:
    """Return the parameters of a group to be added, or refuse them."""
    group = check_dict("add_param_group", param_group, fix="write {'params': [...], 'lr': ...}")
    given = group.get("params")
    entries = [given] if isinstance(given, torch.Tensor) else list(given or ())
    known: set[torch.Tensor] = {member.parameter for member in binding.members()}
    parameters: list[nn.Parameter] = []
    for entry in entries:
        parameter = entry[1] if isinstance(entry, tuple) else entry
        is_tensor = isinstance(parameter, torch.Tensor)
        if not isinstance(parameter, nn.Parameter) or parameter in known:
            raise ConfigurationError(
                mismatch(
                    "add_param_group",
                    expected="nn.Parameter objects that are in no group yet",
                    got=f"a {type(parameter).__name__}"
                    + (f" of shape {tuple(parameter.shape)}" if is_tensor else ""),
                    fix="list each parameter in one group",
                )
            )
        known.add(parameter)
        parameters.append(parameter)
    return parameters


def _names(groups: Sequence[Sequence[nn.Parameter]]) -> list[str]:
    """Name parameters of which only the place in the optimizer is known."""
    return [
        f"param_groups[{g}]['params'][{i}]"
        for g, group in enumerate(groups)
        for i in range(len(group))
    ]


def _check_stage(options: SetUp) -> None:
    """Require a stage for parameters that no module shards, and one that can do without."""
    if options.stage == PARAMETER_STAGE:
        raise ConfigurationError(
            mismatch(
                "stage",
                expected="0, 1 or 2: an optimizer alone cannot shard parameters",
                got=options.stage,
                fix="call shardwise.shard(model, stage=3) and make the ShardedOptimizer without "
                "a stage",
            )
        )
    if options.stage is None:
        raise ConfigurationError(
            mismatch(
                "stage",
                expected="0, 1 or 2, since no parameter belongs to a sharded module",
                got=None,
                fix="call shardwise.shard(model, stage=...) first, or pass stage= here",
            )
        )


def _check_managed(parameters: Sequence[nn.Parameter], options: SetUp) -> None:
    """Refuse settings and parameters that do not belong beside a sharded module."""
    if options.given():
        raise ConfigurationError(
            mismatch(
                "ShardedOptimizer",
                expected="these settings from shardwise.shard",
                got=", ".join(options.given()),
                fix="drop them here",
            )
        )
    engines = list({r.engine: None for r in map(record_of, parameters) if r is not None})
    _check_foreign([p for p in parameters if record_of(p) is None], engines)


def _check_foreign(unmanaged: Sequence[nn.Parameter], engines: Sequence[Engine]) -> None:
    """Refuse parameters that are neither sharded nor left out of sharding on purpose."""
    for parameter in unmanaged:
        if not any(parameter in engine.left_out for engine in engines):
            raise ConfigurationError(
                mismatch(
                    "optimizer",
                    expected="parameters of sharded modules",
                    got=f"one of shape {tuple(parameter.shape)} that no sharded module has",
                    fix="shard its module too, or give it an optimizer of its own",
                )
            )


def _check_atoms(parameters: Sequence[nn.Parameter], atom: Atom) -> None:
    """Pack again where the optimizer needs coarser cuts than the chunks have."""
    wanted = atoms_of(parameters, atom)
    by_engine: dict[Engine, dict[nn.Parameter, int]] = {}
    for parameter, numel in wanted.items():
        record = record_of(parameter)
        if record is not None and record.atom_numel != numel:
            by_engine.setdefault(record.engine, {})[parameter] = numel
    for engine, atoms in by_engine.items():
        kept = {r.parameter: r.atom_numel for r in engine.records if r.atom_numel > 1}
        repack(engine, {**kept, **atoms})


def _make_engine(
    parameters: Sequence[nn.Parameter], names: Sequence[str], atom: Atom, options: SetUp
) -> Engine:
    """Shard parameters of which the model is not known."""
    assert options.stage is not None
    named = list(zip(names, parameters, strict=True))
    device = check_parameters(named)
    topology = make_topology(
        stage=options.stage, device=device, mesh=options.mesh, shard_size=options.shard_size
    )
    return Engine(
        named,
        topology,
        EngineOptions(
            stage=options.stage,
            packing=PackingPolicy(
                precision=options.mixed_precision, chunk_bytes=options.chunk_bytes
            ),
            leaves_stand_ins=options.leaves_stand_ins,
            offload=check_offload(options.offload, stage=options.stage),
        ),
        atoms=atoms_of(parameters, atom),
    )
