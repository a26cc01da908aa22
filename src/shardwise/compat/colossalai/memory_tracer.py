"""Record ``MemStats``: of a plain module (``RuntimeMemTracer``), or of a sharded one at first."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.compat.colossalai.memstats import MemStats

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence


class UseRecorder:
    """Notes the operators that take parameters, inside ``watching``; it changes no value."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], model_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """Watch parameters.

        Args:
            parameters: Of a module, sharded or plain.
            model_bytes: Returns the bytes of parameters on the accelerator.
        """
        self.memstats = MemStats()
        self.has_ended = False
        """True stops all recording, also that of graphs that still exist."""
        self._watched: MutableMapping[nn.Parameter, None] = WeakTensorKeyDictionary()
        self._watched.update(dict.fromkeys(parameters))
        self._model_bytes = model_bytes

    @contextmanager
    def watching(self) -> Generator[None]:
        """Record what happens inside, and backward passes over graphs that are made inside."""
        if self.has_ended:
            yield
            return
        with _Watch(self):
            yield

    def used_by(self, arguments: object) -> list[nn.Parameter]:
        """Return the watched parameters among arguments, each once."""
        found = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, nn.Parameter))
        return list(dict.fromkeys(leaf for leaf in found if leaf in self._watched))

    def note(self, used: Sequence[nn.Parameter], *_: object) -> None:
        """Record one step."""
        if self.has_ended:
            return
        overall = torch.accelerator.memory_allocated() if torch.accelerator.is_available() else 0
        self.memstats.increase_preop_step(
            used, overall_bytes=overall, model_bytes=self._model_bytes()
        )


class _Watch(TorchFunctionMode):
    """Sees every operator."""

    def __init__(self, recorder: UseRecorder) -> None:
        """Tell a recorder."""
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        """Run an operator; note it if its result depends on a watched parameter."""
        given = kwargs or {}
        used = self._recorder.used_by((args, given))
        result = func(*args, **given)
        if not used:
            return result
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        nodes = list(dict.fromkeys(t.grad_fn for t in outputs if t.grad_fn is not None))
        is_attribute = getattr(func, "__name__", "__get__").startswith("__")
        is_plain = not (torch.is_grad_enabled() or is_attribute or _are_views(outputs, used))
        if nodes or is_plain:
            self._recorder.note(used)
        for node in nodes[:1]:
            node.register_prehook(partial(self._recorder.note, used))
        return result


def _are_views(outputs: Sequence[torch.Tensor], used: Sequence[nn.Parameter]) -> bool:
    """Return whether nothing was computed: the engine looks at parameters, too."""
    storages = {parameter.untyped_storage()._cdata for parameter in used}
    return all(tensor.untyped_storage()._cdata in storages for tensor in outputs)


class RuntimeMemTracer:
    """Runs one forward and backward pass of a plain module and records which parameters they use.

    The pass leaves no trace: parameters are never cast, and gradients, buffers and random state are
    as before. Gradients are freed as they arrive.

    Args:
        module: Not sharded yet.
        dtype: Without effect: the module runs in its own dtype, so that no value is rounded.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> tracer = RuntimeMemTracer(model)
        >>> tracer.backward(tracer(torch.ones(1, 2)).sum())
        >>> tracer.memstats().num_steps
        4
        >>> tracer.parameters_in_runtime_order() == list(model.parameters())
        True
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.half) -> None:
        self.module = module
        parameters = list(module.parameters())
        is_on_accelerator = any(p.device.type != "cpu" for p in parameters)
        num_bytes = sum(p.numel() * p.dtype.itemsize for p in parameters) * is_on_accelerator
        self._recorder = UseRecorder(parameters, lambda: num_bytes)
        self._before: _Before | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - that of the module
        """Call the module."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - that of the module
        """Call the module; ``backward`` makes undone what that changes."""
        self._before = self._before or _Before(self.module)
        try:
            with self._recorder.watching():
                return self.module(*args, **kwargs)
        except BaseException:
            self._restore()
            raise

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss, freeing gradients; restore what was before forward."""
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(_drop) for p in trainable]
        try:
            with self._recorder.watching():
                loss.backward()
        finally:
            for handle in handles:
                handle.remove()
            self._restore()
        self._recorder.has_ended = True

    def memstats(self) -> MemStats:
        """Return what was recorded."""
        return self._recorder.memstats

    def parameters_in_runtime_order(self) -> list[nn.Parameter]:
        """Return the parameters in order of first use."""
        return self._recorder.memstats.param_order()

    def _restore(self) -> None:
        """Undo what forward has changed."""
        if self._before is not None:
            self._before.restore()
        self._before = None


class _Before:
    """What a pass changes besides the values that it computes."""

    def __init__(self, module: nn.Module) -> None:
        """Keep gradients, buffers and random state; gradients are gone meanwhile."""
        self._gradients = {p: p.grad for p in module.parameters()}
        self._buffers = [(b, b.detach().clone()) for b in module.buffers()]
        self._random = torch.get_rng_state()
        self._device_random: torch.Tensor | None = None
        if torch.accelerator.is_available():
            self._device_random = torch.get_device_module().get_rng_state()
        for parameter in self._gradients:
            parameter.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        for buffer, value in self._buffers:
            buffer.copy_(value)
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.get_device_module().set_rng_state(self._device_random)


def _drop(parameter: torch.Tensor) -> None:
    """Free a gradient."""
    parameter.grad = None
