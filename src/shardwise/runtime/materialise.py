"""Give modules built on the meta device their values, a few modules at a time.

Modules are initialised in the order in which an ordinary build would have done it (children before
the module that owns them), each into memory of its own, when packing asks for its parameters; the
values are gone again as soon as they are packed. Only a module whose initialiser reaches into its
children is initialised together with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigurationError, mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.runtime.managed import ManagedParameter

_NAMES = ("reset_parameters", "_reset_parameters")


class Materialiser:
    """Initialises the meta parameters and buffers of one module, in order."""

    def __init__(
        self,
        root: nn.Module,
        device: torch.device,
        init_fn: Callable[[nn.Module], object] | None = None,
    ) -> None:
        """Check that every module with meta tensors can be initialised; change nothing.

        Args:
            root: Parameters of it that have values keep them.
            device: Where values come to lie.
            init_fn: Initialises the parameters and buffers that one module owns itself, in place;
                default: its ``reset_parameters()``.

        Raises:
            ConfigurationError: Names every module that has no initialiser.
        """
        self._device = device
        self._init_fn = init_fn
        self._groups = iter(list(_groups(root, with_children=init_fn is None)))
        self._values: dict[nn.Parameter, torch.Tensor] = {}
        self._done: set[nn.Parameter] = set()
        if init_fn is None:
            _check_initialisers(root)

    def read(self, record: ManagedParameter) -> torch.Tensor:
        """Return the value of a parameter, initialising modules up to its own; forget it."""
        if not record.parameter.is_meta:
            return record.values.detach()
        while record.parameter not in self._values:
            self._initialise(next(self._groups))
        return self._values.pop(record.parameter)

    def finish(self) -> None:
        """Initialise what packing did not ask for: other parameters, and buffers."""
        for group in self._groups:
            self._initialise(group)
        for parameter, value in self._values.items():
            replace_value(parameter, value)
        self._values.clear()

    @torch.no_grad()
    def _initialise(self, group: list[nn.Module]) -> None:
        """Initialise some modules together and keep the values of their parameters."""
        originals = [
            (module, name, parameter)
            for module in group
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        fresh = {parameter: self._empty(parameter) for _, _, parameter in originals}
        for module, name, parameter in originals:
            module._parameters[name] = fresh[parameter]
        kept = self._lend_buffers(group)
        try:
            for module in group:
                initialise = self._init_fn or _reset
                initialise(module)
            self._keep(originals)
        finally:
            for module, name, parameter in originals:
                module._parameters[name] = parameter
            for module, name, buffer in kept:
                module._buffers[name] = buffer

    def _lend_buffers(self, group: list[nn.Module]) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Give meta buffers memory; return those with values, which stay as they are."""
        kept: list[tuple[nn.Module, str, torch.Tensor]] = []
        for module in group:
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self._device)
                else:
                    kept.append((module, name, buffer))
                    module._buffers[name] = buffer.clone()
        return kept

    def _keep(self, originals: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        """Remember the values of parameters that had none."""
        for module, name, parameter in originals:
            now = module._parameters[name]
            if parameter.is_meta and parameter not in self._done and now is not None:
                self._done.add(parameter)
                self._values[parameter] = now.detach()

    def _empty(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return memory for a parameter; a tied one that is done already is only a place to draw.

        An ordinary build draws for it too, before the tie replaces what was drawn.
        """
        with torch._C.DisableTorchFunctionSubclass():
            value = torch.empty_like(parameter, device=self._device)
        return nn.Parameter(value, requires_grad=parameter.requires_grad)


def has_meta(module: nn.Module) -> bool:
    """Return whether some parameter has no values yet."""
    return any(parameter.is_meta for parameter in module.parameters())


def device_for(module: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Return where a module on the meta device comes to lie."""
    placed = next((p.device for p in module.parameters() if not p.is_meta), None)
    if placed is not None:
        return placed
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else None
    accelerator = torch.accelerator.current_accelerator()
    kind = kind or (accelerator.type if accelerator is not None else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def replace_value(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter a value of another device or dtype; it stays the same object."""
    fresh = nn.Parameter(value, requires_grad=parameter.requires_grad)
    fresh.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, fresh)


def _groups(root: nn.Module, *, with_children: bool) -> Iterator[list[nn.Module]]:
    """Yield modules with meta tensors of their own, children first, with who must come along."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, group: list[nn.Module] | None) -> Iterator[list[nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        reaches_down = with_children and next(module.children(), None) is not None
        opens = group is None and reaches_down and _find_initialiser(module) is not None
        members: list[nn.Module] | None = [] if opens else group
        for child in module.children():
            yield from visit(child, members)
        wanted = _owns_meta(module) or (members is not None and reaches_down)
        if wanted and (not with_children or _find_initialiser(module) is not None):
            if members is None:
                yield [module]
            else:
                members.append(module)
        if opens and members and any(_owns_meta(member) for member in members):
            yield members

    yield from visit(root, None)


def _owns_meta(module: nn.Module) -> bool:
    """Return whether a module itself has tensors without values."""
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _find_initialiser(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's initialiser."""
    return next((getattr(module, name) for name in _NAMES if hasattr(module, name)), None)


def _reset(module: nn.Module) -> None:
    """Call the initialiser of a module."""
    initialise = _find_initialiser(module)
    assert initialise is not None
    initialise()


def _check_initialisers(root: nn.Module) -> None:
    """Refuse modules with meta tensors and no initialiser, by name."""
    missing = [
        f"{name or 'the module itself'} ({type(module).__name__})"
        for name, module in root.named_modules()
        if _owns_meta(module) and _find_initialiser(module) is None
    ]
    if missing:
        raise ConfigurationError(
            mismatch(
                "modules on the meta device",
                expected="reset_parameters() on each that owns parameters or buffers",
                got=f"none on {', '.join(missing)}",
                fix="pass init_fn= to shard, which initialises what one module owns",
            )
        )
