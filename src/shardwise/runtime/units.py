"""Units, the modules whose parameters are gathered together, and what happens around their calls.

The default choice: every child of a container of repeated blocks is a unit; outside of those, every
module that owns parameters. A unit gathers and pins its chunks while it runs; the outermost running
unit also lets autograd save handles instead of views.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from shardwise.errors import ConfigurationError, mismatch
from shardwise.residency import Segment
from shardwise.runtime.containers import map_tensors
from shardwise.runtime.gatherer import OUTSIDE_BACKWARD
from shardwise.runtime.hooks import Hook
from shardwise.runtime.managed import record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.autograd.graph import saved_tensors_hooks

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.gatherer import Gatherer
    from shardwise.runtime.handles import SavedViews

NEIGHBOUR_BYTES = 4 * 2**20
"""Smaller messages cost more than their bytes."""

_USES_PARAMETERS_OF_CHILDREN = (nn.MultiheadAttention,)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Unit:
    """One module and the parameters that its calls need."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    is_whole: bool
    """It owns its parameters for packing; False: it uses some that lie between units."""


def find_units(root: nn.Module, kinds: Sequence[type[nn.Module]] | None) -> list[Unit]:
    """Return the units below (or at) a root, in order of definition; nested ones end at the outer.

    Args:
        root: The sharded module.
        kinds: Classes whose outermost instances are units; None for the default choice.

    Raises:
        ConfigurationError: No module is of one of the kinds.
    """
    units: list[Unit] = []
    used: set[type[nn.Module]] = set()

    def visit(module: nn.Module, name: str, *, is_repeated: bool) -> None:
        kind = type(original(module))
        wanted = is_repeated if kinds is None else kind in kinds
        if wanted:
            used.add(kind)
            units.append(Unit(name, module, tuple(module.parameters()), is_whole=True))
            return
        own = isinstance(module, _USES_PARAMETERS_OF_CHILDREN)
        direct = tuple(module.parameters(recurse=own))
        if direct:
            units.append(Unit(name, module, direct, is_whole=False))
        repeats = kinds is None and _is_repeated(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            visit(child, path, is_repeated=repeats)

    visit(root, "", is_repeated=False)
    missing = set(kinds or ()) - used
    if missing:
        raise ConfigurationError(
            mismatch(
                "units",
                expected="classes of modules inside the sharded one",
                got=", ".join(sorted(kind.__name__ for kind in missing)),
                fix="name the class of the blocks, such as type(model.layers[0])",
            )
        )
    return units


def _is_repeated(container: nn.Module) -> bool:
    """Return whether a container holds several blocks of one class with parameters."""
    if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    children = list(container.children())
    kinds = {type(original(child)) for child in children}
    has_parameters = all(next(child.parameters(), None) is not None for child in children)
    return len(children) > 1 and len(kinds) == 1 and has_parameters


def original(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` wrapped, or the module itself."""
    wrapped = getattr(module, "_orig_mod", module)
    return wrapped if isinstance(wrapped, nn.Module) else module


def bundle(units: Sequence[Unit]) -> dict[nn.Parameter, int]:
    """Return the number of the bundle of every parameter: what is packed, and gathered, together.

    A block is a bundle. Parameters between blocks are bundled with neighbours up to a few MiB.
    """
    bundles: dict[nn.Parameter, int] = {}
    number, used_bytes = 0, 0
    for unit in units:
        fresh = [parameter for parameter in unit.parameters if parameter not in bundles]
        size_bytes = sum(p.numel() * p.element_size() for p in fresh)
        if unit.is_whole or (used_bytes and used_bytes + size_bytes > NEIGHBOUR_BYTES):
            number, used_bytes = number + 1, 0
        bundles.update(dict.fromkeys(fresh, number))
        used_bytes += size_bytes
        if unit.is_whole:
            number, used_bytes = number + 1, 0
    return bundles


@dataclass(slots=True)
class _Frame:
    """A unit that is running."""

    unit: Unit
    chunks: tuple[Chunk, ...] = ()
    saving: saved_tensors_hooks | None = None
    with_grad: bool = False


@dataclass(slots=True)
class _Attached:
    """How a unit is watched; the unit is owned by the hooks of its module."""

    unit: weakref.ref[Unit]
    handles: list[Any] = field(default_factory=list)


class UnitCalls:
    """Gathers around the calls of all units of one engine."""

    def __init__(self, engine: Engine, gatherer: Gatherer, views: SavedViews) -> None:
        """Serve one engine."""
        self._engine = engine
        self._gatherer = gatherer
        self._views = views
        self._frames: list[_Frame] = []
        self._attached: list[_Attached] = []

    def serve(self, gatherer: Gatherer, views: SavedViews) -> None:
        """Serve chunks that were packed anew."""
        self._gatherer, self._views = gatherer, views

    @property
    def is_running(self) -> bool:
        """True while a unit is being called."""
        return bool(self._frames)

    def attach(self, root: nn.Module, units: Iterable[Unit]) -> None:
        """Watch the calls of units, and of the root as the outermost of them."""
        chosen = [unit for unit in units if unit.module is not root or unit.is_whole]
        if all(unit.module is not root for unit in chosen):
            chosen.insert(0, Unit("", root, (), is_whole=False))
        for unit in chosen:
            attached = _Attached(weakref.ref(unit))
            self._attached.append(attached)
            self._watch(attached)

    def follow_compilation(self) -> None:
        """Move hooks of modules that were compiled since out of the compiled code."""
        for attached in self._attached:
            unit = attached.unit()
            call = None if unit is None else unit.module._compiled_call_impl
            if call is not None and not isinstance(call, _CompiledCall):
                self._watch(attached)

    def _watch(self, attached: _Attached) -> None:
        """Hook one unit, outside of its compiled code where there is some."""
        unit = attached.unit()
        if unit is None:
            return
        for handle in attached.handles:
            handle.remove()
        module = unit.module
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = _CompiledCall(self, unit, module._compiled_call_impl)
            attached.handles = []
            return
        enter, leave = _Enter(self, unit), _Leave(self, unit)
        attached.handles = [
            module.register_forward_pre_hook(Hook(enter), prepend=True),
            module.register_forward_hook(Hook(leave), always_call=True),
        ]

    # ------------------------------------------------------------------ around a call

    def enter(self, unit: Unit) -> None:
        """Gather what a unit needs, before it runs."""
        in_backward = torch._C._current_graph_task_id() != OUTSIDE_BACKWARD
        frame = _Frame(unit, with_grad=torch.is_grad_enabled())
        if not self._frames:
            self._engine.refuse_stale_forward()
            self.follow_compilation()
            if not in_backward:
                is_training = frame.with_grad
                self._gatherer.begin(Segment.FORWARD if is_training else Segment.EVALUATION)
        self._frames.append(frame)
        if frame.with_grad and not self._gatherer.keeps_all:
            frame.saving = self._views.hooks()
        if frame.saving is not None:
            frame.saving.__enter__()
        chunks = tuple(self._chunks_of(unit))
        self._gatherer.pin(chunks)
        frame.chunks = chunks

    def leave(self, unit: Unit, output: Any = None) -> Any:  # noqa: ANN401 - any output
        """Let go of what a unit needed, whether it returned or raised; return its output."""
        if not self._frames or self._frames[-1].unit is not unit:
            return output  # another hook raised before this unit was entered
        frame = self._frames.pop()
        self._gatherer.unpin(frame.chunks)
        if frame.saving is not None:
            frame.saving.__exit__(None, None, None)
        if not self._frames and torch._C._current_graph_task_id() == OUTSIDE_BACKWARD:
            # None: it raised, or nothing can have been saved for a backward pass
            self._gatherer.end_forward(with_grad=frame.with_grad and output is not None)
        if frame.with_grad and frame.chunks and not self._gatherer.keeps_all:
            return map_tensors(_BeforeBackward(self._gatherer, frame.chunks).watch, output)
        return output

    def unwind(self) -> None:
        """Leave units that an interrupt has torn down: torch calls no hooks after those."""
        while self._frames:
            frame = self._frames.pop()
            self._gatherer.unpin(frame.chunks)
            if frame.saving is not None:
                frame.saving.__exit__(None, None, None)

    @staticmethod
    def _chunks_of(unit: Unit) -> Iterable[Chunk]:
        """Return the chunks of a unit's parameters as they are registered today."""
        module = unit.module
        if unit.is_whole or isinstance(module, _USES_PARAMETERS_OF_CHILDREN):
            parameters = module.parameters()
        else:
            parameters = (p for p in module._parameters.values() if p is not None)
        records = [record_of(parameter) for parameter in parameters]
        return dict.fromkeys(record.chunk for record in records if record is not None)


class _Enter:
    """Forward pre-hook of a unit."""

    def __init__(self, calls: UnitCalls, unit: Unit) -> None:
        self._calls, self._unit = calls, unit

    def __call__(self, module: nn.Module, args: object) -> None:
        """Gather."""
        self._calls.enter(self._unit)


class _Leave:
    """Forward hook of a unit."""

    def __init__(self, calls: UnitCalls, unit: Unit) -> None:
        self._calls, self._unit = calls, unit

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401
        """Let go."""
        return self._calls.leave(self._unit, output)


class _CompiledCall:
    """The compiled call of a unit with what happens around it, which is not compiled."""

    def __init__(self, calls: UnitCalls, unit: Unit, compiled: Callable[..., Any]) -> None:
        self._calls, self._unit, self._compiled = calls, unit, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any module
        """Gather, call, let go."""
        output = None
        try:
            self._calls.enter(self._unit)
            output = self._compiled(*args, **kwargs)
        finally:
            output = self._calls.leave(self._unit, output)
        return output


class _BeforeBackward:
    """Gathers a unit's chunks when a gradient reaches its output.

    Backward would gather them at the first handle too, but a rank that has none, since it did not
    use the parameters of a unit that it called, must take part.
    """

    def __init__(self, gatherer: Gatherer, chunks: tuple[Chunk, ...]) -> None:
        self._gatherer, self._chunks = gatherer, chunks

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the output to use: an alias where another unit watches the tensor already.

        Hooks of one tensor are called in the order of forward, and those of aliases in reverse.
        """
        if not tensor.requires_grad or tensor.is_leaf or is_functorch_wrapped_tensor(tensor):
            return tensor
        hooks = tensor._backward_hooks or {}
        if any(isinstance(hook, _BeforeBackward) for hook in hooks.values()):
            tensor = tensor.view_as(tensor)
        tensor.register_hook(self)
        return tensor

    def __call__(self, grad: torch.Tensor) -> None:
        """Gather what some rank needs."""
        for chunk in self._chunks:
            if chunk.is_needed_in_backward:
                self._gatherer.fetch(chunk)
