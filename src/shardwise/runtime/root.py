"""What happens around a call of the sharded module itself: dtypes in and out, and stale state.

Only the root is hooked, but for loading; submodules run exactly as written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.residency import Segment
from shardwise.runtime.activations import SavedTensorWatch
from shardwise.runtime.containers import cast_floating, map_tensors
from shardwise.runtime.hooks import Hook
from shardwise.runtime.meter import Holding

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine


class RootHooks:
    """Hooks of one sharded module. A copy or pickle of the module has none."""

    def __init__(self, engine: Engine) -> None:
        """Serve one engine."""
        self._engine = engine
        self._watch_saved = SavedTensorWatch(engine.meter)

    def attach(self, module: nn.Module) -> None:
        """Hook the module."""
        module.register_forward_pre_hook(Hook(self.before_forward), with_kwargs=True)
        module.register_forward_hook(Hook(self.after_forward))
        residence = self._engine.residence
        saves_parameters = residence is None or residence.gatherer.keeps_all
        if self._engine.meter.is_on and saves_parameters:  # nothing else looks at what is saved
            module.register_forward_pre_hook(Hook(self.before_saving))
            module.register_forward_hook(Hook(self.after_saving), always_call=True)
        module.register_load_state_dict_pre_hook(Hook(self.before_load))
        for part in module.modules():
            part.register_load_state_dict_pre_hook(Hook(_copy_always))

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Refuse to build on a broken step, cast inputs, wait where first uses cannot."""
        engine = self._engine
        with_grad = torch.is_grad_enabled()
        if with_grad:
            engine.refuse_stale_forward()
            engine.reducer.watch()
            if engine.residence is None:
                engine.recorder.note(engine.chunks, Segment.FORWARD)
        if engine.values.are_in_flight and (not with_grad or _is_compiled(module)):
            engine.values.settle()
        precision = engine.precision
        if precision is None or precision.param_dtype is None:
            return None
        dtype = precision.param_dtype
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def before_saving(self, module: nn.Module, args: object) -> None:
        """Start to count activations."""
        self._watch_saved.begin()

    def after_saving(self, module: nn.Module, args: object, output: object) -> None:
        """Count no more, also after an error."""
        self._watch_saved.end()

    def after_forward(self, module: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401
        """Cast outputs and learn when their backward pass begins."""
        precision = self._engine.precision
        if precision is not None and precision.output_dtype is not None:
            output = cast_floating(output, precision.output_dtype)
        if torch.is_grad_enabled():
            map_tensors(self._watch, output)
        return output

    def _watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Call back when a gradient reaches this output."""
        if tensor.requires_grad and not tensor.is_leaf and not _is_transformed(tensor):
            tensor.register_hook(self._note)
            self._engine.meter.watch_new(tensor, Holding.ACTIVATIONS)
        return tensor

    def _note(self, grad: torch.Tensor) -> None:
        """Tell the reducer of today: repacking may have replaced an earlier one."""
        self._engine.reducer.note_backward(grad)

    def before_load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *_: object,
    ) -> None:
        """Let no update be in flight."""
        self._engine.values.settle()


def _copy_always(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *_: object,
) -> None:
    """Copy values where ``assign=True`` would replace parameters: they belong to chunks.

    Torch leaves its mark in the metadata of the user's state dict, where the next load of the same
    dict, into whatever module, finds it again.
    """
    local_metadata.pop("assign_to_params_buffers", None)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether some part runs as compiled code, which must see plain parameters."""
    return any(
        part._compiled_call_impl is not None or hasattr(part, "_orig_mod")
        for part in module.modules()
    )


def _is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a function transform (vmap, jvp, grad) wraps the tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
