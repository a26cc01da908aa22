"""``ZeroOptimizer``: the optimizer of a ``ZeroDDP``, updating where state rests.

It holds a ``ShardedOptimizer`` and adds what differs: loss scaling and clipping are its own
arguments, and a step uses gradients up.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardwise.compat.colossalai.adam import HybridAdam
from shardwise.compat.colossalai.wrapper import ShardedWrapper
from shardwise.compat.colossalai.zero_ddp import ZeroDDP
from shardwise.errors import ConfigurationError, mismatch
from shardwise.optimizer.arguments import check_clip
from shardwise.optimizer.setup import SetUp, set_up
from shardwise.optimizer.sharded import ShardedOptimizer
from shardwise.options import LossScale
from shardwise.runtime.norms import check_norm_type
from shardwise.shard import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn


class ZeroOptimizer(ShardedWrapper):
    """A torch optimizer over a ``ZeroDDP``: every piece is updated where its state rests.

    The optimizer is changed in place: its groups hold this rank's pieces. Give schedulers the
    original optimizer (``unwrap()``) or this one: they share their groups.

    Args:
        optim: Any optimizer instance over the module's parameters; ``HybridAdam`` for example.
        module: The sharded module.
        gpu_margin_mem_ratio: From 0 to 1; without effect: with "auto" state stays on the
            accelerator as far as it fits, and no number depends on where it is.
        initial_scale: Loss scale of the first float16 step: 2**16, since the 2**32 of that library
            costs the first 16 steps. Like the next six it is not looked at for other dtypes.
        min_scale: The scale never falls below it.
        growth_factor: The scale grows by it after ``growth_interval`` good steps.
        backoff_factor: The scale falls by it after ``hysteresis`` overflows.
        growth_interval: Good steps in a row before a growth.
        hysteresis: Overflows since the last growth before the scale falls.
        max_scale: The scale never rises above it.
        clipping_norm: Clip the global norm of gradients to it; 0 does not clip.
        norm_type: The p of that norm, positive or inf.

    Raises:
        ConfigurationError: Before anything is changed.

    Collectives: as ``ShardedOptimizer``.

    Example:
        >>> model = ZeroDDP(torch.nn.Linear(4, 2))
        >>> optimizer = ZeroOptimizer(HybridAdam(model.parameters(), lr=0.01), model)
        >>> optimizer.backward(model(torch.ones(1, 4)).mean())
        >>> optimizer.step()
        >>> optimizer.loss_scale
        65536.0
    """

    def __init__(  # noqa: PLR0913 - the signature that scripts were written for
        self,
        optim: torch.optim.Optimizer,
        module: ZeroDDP,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        clipping_norm: float = 0.0,
        norm_type: float = 2.0,
    ) -> None:
        _check(module, gpu_margin_mem_ratio)
        max_norm = check_clip(clipping_norm or None)
        scale = None
        if any(p.dtype is torch.float16 for p in module.parameters()):
            scale = LossScale(
                initial_scale=float(initial_scale),
                min_scale=float(min_scale),
                max_scale=float(max_scale),
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                hysteresis=hysteresis,
            )
        options = SetUp(stage=None, loss_scale=scale, norm_type=check_norm_type(norm_type))
        binding = set_up(optim, options)
        sharded = ShardedOptimizer.from_binding(optim, binding, options, max_norm)
        super().__init__(sharded, binding)
        self.module = module
        manager = module.gemini_manager
        if manager is not None:
            manager.chunk_manager.serve(engine_of(module.module), sharded)

    # ------------------------------------------------------------------ one step

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar loss, scaled under float16, and reduce them.

        Gradients add up until ``step`` or ``zero_grad``. Collectives: as
        ``ShardedOptimizer.backward``.
        """
        with self._watching():
            self._sharded.backward(loss)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """As ``backward``, from a gradient of ``tensor`` that is already scaled."""
        with self._watching():
            self._sharded.backward_by_grad(tensor, grad)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update and use the gradients up.

        A step with a gradient that is not finite on any rank is skipped on all.

        Collectives: as ``ShardedOptimizer.step``.
        """
        loss = self._sharded.step(closure)
        self._sharded.zero_grad()
        return loss

    def clip_grad_norm(
        self, model: nn.Module, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the reduced gradients to a global norm now; return the norm before.

        Args:
            model: Without effect: gradients are those of this optimizer.
            max_norm: Largest norm.
            norm_type: The p of the norm.
        """
        return self.clip_grad_by_norm(max_norm, norm_type)

    # ------------------------------------------------------------------ what a user reads

    @property
    def grad_norm(self) -> float:
        """Global norm of the last step before clipping."""
        return self._sharded.grad_norm

    @property
    def last_step_skipped(self) -> bool:
        """True if a gradient of the last step was not finite on some rank."""
        return self._sharded.last_step_skipped

    def _watching(self) -> AbstractContextManager[None]:
        """Let the first pass be recorded where the policy asks for it."""
        manager = self.module.gemini_manager
        return nullcontext() if manager is None else manager.watching(is_backward=True)


class GeminiAdamOptimizer(ZeroOptimizer):
    """``ZeroOptimizer(HybridAdam(model.parameters(), ...), model, ...)`` in one call.

    Args:
        model: The sharded module.
        defaults: Arguments of ``HybridAdam`` and of ``ZeroOptimizer``, by name.

    Example:
        >>> model = ZeroDDP(torch.nn.Linear(4, 2))
        >>> optimizer = GeminiAdamOptimizer(model, lr=0.01, clipping_norm=1.0)
        >>> optimizer.param_groups[0]["lr"]
        0.01
    """

    def __init__(
        self,
        model: ZeroDDP,
        **defaults: Any,  # noqa: ANN401 - arguments of the two classes
    ) -> None:
        names = inspect.signature(ZeroOptimizer.__init__).parameters.keys()
        own = {name: value for name, value in defaults.items() if name in names}
        rest = {name: value for name, value in defaults.items() if name not in names}
        _check(model, own.get("gpu_margin_mem_ratio", 0.0))
        super().__init__(HybridAdam(model.parameters(), **rest), model, **own)


def _check(module: object, ratio: float) -> None:
    """Refuse a module that is not sharded, and a ratio that is none."""
    if not isinstance(module, ZeroDDP):
        raise ConfigurationError(
            mismatch(
                "module",
                expected="a ZeroDDP",
                got=type(module).__name__,
                fix="wrap it first: ZeroDDP(module, gemini_manager)",
            )
        )
    if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ConfigurationError(
            mismatch(
                "gpu_margin_mem_ratio",
                expected="a number from 0 to 1",
                got=repr(ratio),
                fix="pass a share of the room that is left on the accelerator",
            )
        )
