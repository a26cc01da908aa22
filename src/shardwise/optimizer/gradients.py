"""The gradients behind one optimizer: how they come in, what they measure, how they are cleared.

It works over the engines of all members and knows nothing of the update.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ShardwiseError, mismatch
from shardwise.optimizer.arguments import check_weight
from shardwise.runtime import refusals
from shardwise.runtime.norms import global_norm, held_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.optimizer.binding import Binding
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.loss_scaling import LossScaler
    from shardwise.runtime.managed import ManagedParameter

CLIP_EPSILON = 1e-6
"""Added to the norm once, globally, as torch.nn.utils.clip_grad_norm_ does."""


class Gradients:
    """Gradients of the members of one binding."""

    def __init__(self, binding: Binding, scaler: LossScaler) -> None:
        """Serve one optimizer."""
        self._binding = binding
        self._scaler = scaler

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaling in force: None while no trainable parameter is float16."""
        is_scaled = any(engine.is_scaled for engine in self._binding.engines())
        return self._scaler if is_scaled else None

    # ------------------------------------------------------------------ coming in

    def begin(self, weight: float | None) -> float:
        """Prepare a backward pass and return what its loss must be multiplied by.

        That is the scale which gradients of the same step already have, else the current one.
        """
        value = check_weight(weight)
        engines = self._binding.engines()
        for engine in engines:
            engine.forget_factors()
        for engine in engines:
            if engine.has_gradients and (engine.local_weight is None) != (value is None):
                raise refusals.mixed_weights()
        scaler = self.scaler
        scale = 1.0 if scaler is None else scaler.scale
        if scaler is not None:
            scale = next((e.gradient_scale for e in engines if e.has_gradients), scale)
        for engine in engines:
            engine.gradient_scale = scale
            if value is not None or engine.local_weight is not None:
                engine.weigh(value)
        return scale

    def run(self, backward: Callable[[], None]) -> None:
        """Run a backward pass that every engine knows of."""
        for engine in self._binding.engines():
            backward = partial(engine.reducer.backward, backward)
        backward()

    # ------------------------------------------------------------------ at rest

    def settle(self) -> None:
        """Bring gradients and parameters to rest on all ranks. Collectives: see the reducer."""
        engines = self._binding.engines()
        for engine in engines:
            if not engine.reducer.is_synchronising:
                raise ShardwiseError(
                    mismatch(
                        "step",
                        expected="a call outside no_sync",
                        got="one inside",
                        fix="leave no_sync() first; the gradients are then reduced",
                    )
                )
        scaler = self.scaler
        for engine in engines:
            if scaler is not None and not engine.has_gradients:
                # this rank had no pass: what it takes part in now has the scale of the others
                engine.gradient_scale = scaler.scale
            engine.reducer.settle()
            engine.values.settle()
            engine.values.refresh_changed_masters()

    def make_room(self) -> None:
        """Before an update: let homes follow what passes have taken.

        Raises:
            BudgetError: It does not fit, on all ranks alike; nothing was changed.

        Collectives: see ``Adaptation.before_update``.
        """
        for engine in self._binding.engines():
            if engine.adaptation is not None:
                engine.adaptation.before_update(engine)

    def end_step(self) -> None:
        """End a step that updated nothing."""
        for engine in self._binding.engines():
            engine.end_step()

    def exist(self) -> bool:
        """Return whether a step has anything to update."""
        return any(r.is_held for r in self._binding.records()) or bool(self._left_out())

    def measure(self, order: float) -> tuple[float, dict[Engine, float]]:
        """Return the global norm of true gradients, and what each engine's are divided by.

        Collectives: one all-reduce of a number per engine and axis, more where weights are used.
        """
        divisors: dict[Engine, float] = {}
        norms: list[float] = []
        left_out = self._left_out() if self._binding.left_out() else None
        for engine, records in self._by_engine().items():
            divisor = engine.gradient_divisor()
            copied = None if divisors else left_out
            runs = held_runs(record for record in records if record.is_counted)
            raw = global_norm(runs, copied, order=order, topology=engine.topology)
            divisors[engine] = divisor
            norms.append(raw / divisor if divisor else math.nan)
        if len(norms) == 1:
            return norms[0], divisors
        if math.isinf(order):
            return max(norms, default=0.0), divisors
        return sum(norm**order for norm in norms) ** (1 / order), divisors

    def multiply_(self, coefficient: float) -> None:
        """Scale all gradients in place."""
        for records in self._by_engine().values():
            for run in held_runs(records):
                run.mul_(coefficient)
        for gradient in self._left_out():
            gradient.mul_(coefficient)

    def clamp_(self, limit: float, divisors: dict[Engine, float]) -> None:
        """Limit every element of the true gradients, which are stored undivided, in place."""
        for engine, records in self._by_engine().items():
            for run in held_runs(records):
                bound = min(limit * divisors[engine], torch.finfo(run.dtype).max)
                run.clamp_(-bound, bound)
        for gradient in self._left_out():
            bound = limit * next(iter(divisors.values()), 1.0)
            bound = min(bound, torch.finfo(gradient.dtype).max)
            gradient.clamp_(-bound, bound)

    def scale_left_out_(self, divisors: dict[Engine, float], coefficient: float) -> None:
        """Unscale and clip, in place, gradients that the stepper does not see in slices."""
        divisor = next(iter(divisors.values()), 1.0)
        for gradient in self._left_out():
            if divisor != 1.0:
                gradient.div_(divisor)
            if coefficient != 1.0:
                gradient.mul_(coefficient)

    def clear(self, *, set_to_none: bool) -> None:
        """Clear the gradients of all members; recovers from a broken backward pass."""
        for engine, records in self._by_engine().items():
            engine.zero_grad(records, set_to_none=set_to_none)
        for parameter in self._binding.left_out():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _by_engine(self) -> dict[Engine, list[ManagedParameter]]:
        """Return the records of all members by engine."""
        groups: dict[Engine, list[ManagedParameter]] = {e: [] for e in self._binding.engines()}
        for record in self._binding.records():
            groups[record.engine].append(record)
        return groups

    def _left_out(self) -> list[torch.Tensor]:
        """Return the local gradients of parameters that are not sharded."""
        return [p.grad for p in self._binding.left_out() if p.grad is not None]


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return what gradients are multiplied by so that their norm is at most ``max_norm``."""
    return min(1.0, max_norm / (norm + CLIP_EPSILON))
