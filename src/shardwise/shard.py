"""``shardwise.shard``: put a module's parameters into chunks, in place, and watch its root calls.

The other functions here act on what it made: ``no_sync``, ``full_parameters``, ``full_gradient``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.errors import ConfigurationError, ShardwiseError, mismatch
from shardwise.runtime import whole_gradient
from shardwise.runtime.arguments import (
    check_arguments,
    check_tensor_parallel,
    keep_bytes_of,
    listed,
    units_of,
)
from shardwise.runtime.build import PackingPolicy, check_parameters
from shardwise.runtime.collectives import broadcast_from_first
from shardwise.runtime.engine import Engine
from shardwise.runtime.engine_options import EngineOptions
from shardwise.runtime.managed import ATTRIBUTE, record_of
from shardwise.runtime.materialise import Materialiser, device_for, has_meta
from shardwise.runtime.meter import Holding
from shardwise.runtime.offload import check_offload
from shardwise.runtime.root import RootHooks
from shardwise.runtime.topology import PARAMETER_STAGE, Topology, make_topology
from shardwise.runtime.units import bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.options import AdaptiveOffload, MixedPrecision, StaticOffload

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def shard(  # noqa: PLR0913 - the public face, all by keyword
    module: ModuleT,
    *,
    stage: int = 3,
    mesh: DeviceMesh | None = None,
    shard_size: int | None = None,
    units: Iterable[type[nn.Module]] | None = None,
    mixed_precision: MixedPrecision | None = None,
    chunk_bytes: int | None = None,
    reshard_after_forward: bool | int = True,
    ignored: Iterable[nn.Parameter] = (),
    gradient_reduction: Literal["mean", "sum"] = "mean",
    offload: StaticOffload | AdaptiveOffload | None = None,
    init_fn: Callable[[nn.Module], object] | None = None,
) -> ModuleT:
    """Shard the training state of a module over the data-parallel ranks, in place.

    The module stays the same object with the same class, names and forward signature. Its
    parameters become views into flat chunks; the first rank's parameters and buffers are given to
    all. Make the optimizer before or after, then wrap it in ``ShardedOptimizer``.

    Args:
        module: Any module whose parameters lie on one device, or on the meta device.
        stage: 0 replicates everything (data parallelism), 1 shards optimizer state, 2 also
            gradients, 3 also parameters.
        mesh: The ranks: 1-D, or 2-D (replicate, shard). Default: all ranks.
        shard_size: Short form of the 2-D mesh: shard inside runs of this many ranks.
        units: Stage 3: classes of modules whose parameters are gathered together. Default: the
            children of containers of repeated blocks, else modules that own parameters.
        mixed_precision: Dtypes of parameters, reductions, inputs, outputs and buffers.
        chunk_bytes: Capacity of a chunk; default: searched for the least waste. A larger parameter
            gets a chunk of its own. Stage 3: a unit is one chunk by default.
        reshard_after_forward: Stage 3: True keeps as few gathered chunks as it can (two and one
            ahead), False keeps all until the next step (their second all-gather is
            saved; needed for torch.func.grad inside forward, which forbids the hooks by which
            autograd else saves handles of parameters), an int keeps up to that many bytes.
        ignored: Parameters of the module to leave alone: not broadcast, reduced or sharded.
        gradient_reduction: Gradients are the mean, or the sum, over ranks.
        offload: What rests in host memory or on disk between uses. Updates run where the state
            lies: its gradients leave the accelerator as they are reduced, updated parameters
            return. None keeps everything on the accelerator.
        init_fn: For modules built on the meta device: called with each module that owns parameters
            or buffers without values, children first, to fill these in place. Default: its
            ``reset_parameters()``. One module at a time has values; those whose initialiser reaches
            into its children together with these.

    Returns:
        ``module``.

    Raises:
        ConfigurationError: Before anything is changed, on all ranks alike.

    Collectives: a check, then one broadcast per chunk and buffer. Started by torchrun without a
    process group, it makes one; in a plain process it needs none.

    Memory per rank between steps, N ranks, Adam, float32: stage 0 12 bytes per parameter, stages 1
    and 2 4 + 8/N, stage 3 12/N; bfloat16 with masters: 2 + 12/N, stage 3 14/N.

    At stage 3 a parameter has values only while the module computes, and inside
    ``full_parameters``; a read of it anywhere else raises, and ``state_dict`` is collective. At
    every stage ``load_state_dict`` copies into the chunks, also with ``assign=True``.

    Example:
        >>> import torch, shardwise as sw
        >>> model = sw.shard(torch.nn.Linear(4, 2), stage=2)
        >>> type(model).__name__, tuple(model.weight.shape)
        ('Linear', (2, 4))

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, 2020, section 5; Zhao et al., PyTorch FSDP, 2023, for hybrid sharding.
    """
    kept_out = listed("ignored", ignored, of="parameters")
    check_arguments(module, mixed_precision, chunk_bytes, kept_out, gradient_reduction, init_fn)
    left_alone = frozenset(kept_out)
    named = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter not in left_alone and (parameter.requires_grad or _can_be_packed(parameter))
    ]
    kinds = None if units is None else listed("units", units, of="module classes")
    found = units_of(module, stage, kinds, reshard_after_forward)
    check_tensor_parallel(named, mesh)
    is_meta = has_meta(module)
    device = check_parameters(named, meta_as=device_for(module, mesh) if is_meta else None)
    materialiser = Materialiser(module, device, init_fn) if is_meta else None
    topology = make_topology(stage=stage, device=device, mesh=mesh, shard_size=shard_size)
    packing = PackingPolicy(
        precision=mixed_precision,
        keep_dtype=frozenset(_batch_norm_parameters(module)),
        chunk_bytes=chunk_bytes,
        keeps_slices=stage == PARAMETER_STAGE,
        bundles=bundle(found),
    )
    options = EngineOptions(
        stage=stage,
        packing=packing,
        sums_gradients=gradient_reduction == "sum",
        knows_model=True,
        keep_bytes=keep_bytes_of(reshard_after_forward),
        offload=check_offload(offload, stage=stage),
    )
    engine = Engine(named, topology, options, materialiser=materialiser)
    if materialiser is not None:
        materialiser.finish()
    engine.left_out = frozenset(module.parameters()) - {r.parameter for r in engine.records}
    _share_the_rest(module, engine, left_alone, topology)
    for tensor in (*module.buffers(), *engine.left_out):
        engine.meter.watch(tensor, Holding.RESIDENT)
    module.__dict__[ATTRIBUTE] = engine
    engine.serve(module)
    RootHooks(engine).attach(module)
    if engine.residence is not None:
        engine.residence.attach(module, found)
    return module


@contextmanager
def no_sync(module: nn.Module) -> Generator[None]:
    """Accumulate gradients on this rank without communication; legal at every stage.

    Numbers are those of synchronised passes up to the order of additions. Costs a whole local
    gradient per parameter until the next synchronised backward pass (or ``step``) reduces it.

    Example:
        >>> import torch, shardwise as sw
        >>> model = sw.shard(torch.nn.Linear(4, 2), stage=2)
        >>> with sw.no_sync(model):
        ...     model(torch.ones(1, 4)).sum().backward()
    """
    with engine_of(module).no_sync():
        yield


@contextmanager
def full_parameters(module: nn.Module, *, writeback: bool = False) -> Generator[None]:
    """Inside, every parameter of the module is whole and has its newest value on this rank.

    Args:
        module: A module that ``shard`` was called on, or a part of one.
        writeback: Keep changes made inside. The first rank's values are then given to all ranks,
            and masters are taken from them.

    Raises:
        BudgetError: They do not fit beside what the accelerator holds now; nothing was gathered.
        ShardwiseError: On leaving, if parameters were changed inside without ``writeback``.

    Collectives: the wait for updates in flight, at stage 3 an all-gather per chunk; with
    ``writeback`` a broadcast per chunk.

    Memory: at stage 3 the whole module on this rank.
    """
    engine = engine_of(module)
    records = [r for r in map(record_of, module.parameters()) if r is not None]
    with engine.whereabouts.during("full_parameters()"), engine.values.whole(records):
        before = [_identity_of(record.parameter) for record in records]
        is_kept = False
        try:
            yield
            if writeback:
                engine.values.adopt_whole(records)
                is_kept = True
        finally:
            changed = [
                record
                for record, identity in zip(records, before, strict=True)
                if _identity_of(record.parameter) != identity
            ]
            if not is_kept:
                engine.values.disown(changed)
    if changed and not writeback:
        raise ShardwiseError(
            mismatch(
                "full_parameters",
                expected="parameters that are only read",
                got=f"changes to {', '.join(record.name for record in changed)}",
                fix="pass writeback=True to keep them on all ranks",
            )
        )


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the reduced gradient of a managed parameter, whole, on every rank.

    Args:
        parameter: A parameter of a sharded module or of a ``ShardedOptimizer``.

    Returns:
        A new tensor of the parameter's shape, float32 (float64 for float64 parameters), free of
        loss scale and divided by weights; None where no rank has a gradient.

    Raises:
        ConfigurationError: The parameter is not managed.
        ShardwiseError: On all ranks, if some rank has a gradient that was not reduced yet: one of
            ``no_sync``, or one that was assigned.

    Collectives: one flag, and one all-gather of the parameter's chunk, on all ranks.
    """
    record = record_of(parameter)
    if record is None:
        raise ConfigurationError(
            mismatch(
                "full_gradient",
                expected="a parameter that shardwise manages",
                got=f"another {type(parameter).__name__}",
                fix="pass one of a sharded module; that of any other tensor is in its .grad",
            )
        )
    return whole_gradient.full_gradient(record)


def _identity_of(parameter: nn.Parameter) -> tuple[int, int]:
    """Return what changes when values are written, or when ``parameter.data`` is replaced."""
    return parameter._version, parameter.untyped_storage()._cdata


def engine_of(module: nn.Module) -> Engine:
    """Return the engine behind a sharded module or a part of one."""
    if isinstance(module, nn.Module):
        engine = module.__dict__.get(ATTRIBUTE)
        if engine is not None:
            return engine
        for parameter in module.parameters():
            record = record_of(parameter)
            if record is not None:
                return record.engine
    raise ConfigurationError(
        mismatch(
            "module",
            expected="one that shardwise.shard was called on, or a part of it",
            got=type(module).__name__,
            fix="call shardwise.shard(module, stage=...) first and pass that module",
        )
    )


def _can_be_packed(parameter: nn.Parameter) -> bool:
    """Return whether a frozen parameter may lie in a chunk: others are only broadcast."""
    return parameter.is_floating_point() and parameter.layout is torch.strided


def _batch_norm_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters whose kernels want the dtype of the running statistics."""
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            yield from part.parameters(recurse=False)


def _share_the_rest(
    module: nn.Module, engine: Engine, ignored: frozenset[nn.Parameter], topology: Topology
) -> None:
    """Broadcast buffers and unpacked frozen parameters, and cast buffers as asked."""
    managed = {record.parameter for record in engine.records}
    dtype = engine.precision.buffer_dtype if engine.precision is not None else None
    rest: list[torch.Tensor] = [
        p.data for p in module.parameters() if p not in managed and p not in ignored
    ]
    with torch.no_grad():
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                if dtype is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    setattr(part, name, buffer.to(dtype))
        rest += list(module.buffers())
        for tensor in rest:
            if tensor.is_contiguous():
                broadcast_from_first(tensor, topology)
            else:
                whole = tensor.contiguous()
                broadcast_from_first(whole, topology)
                tensor.copy_(whole)
