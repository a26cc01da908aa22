"""A sharded model and its plain twin, taken through the same steps and compared after each.

The oracle runs a fixed loop; a `Pair` follows any loop: tests say what happens, it happens to both.
The twin lives whole on every rank and computes all ranks' passes one after the other, adds their
gradients in rank order and divides once. It shares no code with the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.runtime.managed import ATTRIBUTE, record_of
from tests.kit.oracle import assert_bit_equal

STAGES = (0, 1, 2, 3)
"""Every stage that there is."""

Face = Literal["module", "optimizer"]
FACES: tuple[Face, ...] = ("module", "optimizer")
"""Who shards: `sw.shard` of the module, or `sw.ShardedOptimizer` alone."""


def stages_of(face: Face) -> tuple[int, ...]:
    """Return the stages that a face offers: parameters are sharded by their module only."""
    return STAGES if face == "module" else STAGES[:-1]


UNEVEN_STAGES = (0, 1, 2)
"""Stages at which ranks may call different modules: gathering is collective."""


def has_values_outside(stage: int) -> bool:
    """Return whether parameters have values outside of their module's calls, too."""
    return stage in UNEVEN_STAGES or dist.get_world_size() == 1


def opened(
    model: nn.Module, stage: int, *, writeback: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Return `full_parameters` where parameters have values only in there, else no context."""
    if has_values_outside(stage):
        return contextlib.nullcontext()
    return sw.full_parameters(model, writeback=writeback)


Pass = Callable[[nn.Module, int], Tensor]
"""(model, rank) -> loss of that rank; torch is seeded alike for both sides before each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a model is sharded."""

    stage: int
    face: Face = "module"
    shard: dict[str, Any] = field(default_factory=dict)
    """Further arguments of whatever shards: `sw.shard`, or `sw.ShardedOptimizer`."""
    wrap: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `sw.ShardedOptimizer`."""
    run_size: int = 1
    """Ranks are added up in runs of this many first: the shard groups of a hybrid mesh."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose updates show the gradients themselves."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that decays, counts and keeps two moments."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


class Pair:
    """One sharded model, one plain one, and an optimizer for each."""

    def __init__(
        self,
        build_model: Callable[[], nn.Module],
        build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        *,
        setting: Setting,
    ) -> None:
        """Build both from the same seed and shard one."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.plain = build_model()
        self.plain_optimizer = build_optimizer(self.plain)
        torch.manual_seed(0)
        self.model = build_model()
        inner = build_optimizer(self.model)
        own: dict[str, Any] = {}
        if setting.face == "module":
            sw.shard(self.model, stage=setting.stage, **setting.shard)
        else:
            own = {"stage": setting.stage, **setting.shard}
        self.optimizer = sw.ShardedOptimizer(inner, **own, **setting.wrap)
        self.setting = setting
        self._num_passes = 0
        self._local: list[dict[str, Tensor]] = [{} for _ in range(self.world_size)]

    def both(self, action: Callable[[nn.Module], object]) -> None:
        """Do something to both models."""
        action(self.model)
        action(self.plain)

    # ------------------------------------------------------------------ one step

    def backward(
        self,
        loss: Pass,
        *,
        synchronised: bool = True,
        bare: bool = False,
        forward_outside: bool = False,
        is_exact: bool = True,
    ) -> None:
        """Run one backward pass of every rank; losses must agree to the bit.

        Args:
            loss: Computes the loss of one rank.
            synchronised: False runs it under `no_sync`.
            bare: Call `loss.backward()` instead of `optimizer.backward(loss)`.
            forward_outside: Only the backward pass is inside `no_sync`.
            is_exact: False where earlier steps were clipped, which rounds in another order.
        """
        with contextlib.ExitStack() as stack:
            if not synchronised and not forward_outside:
                stack.enter_context(self.optimizer.no_sync())
            self._seed(self.rank)
            value = loss(self.model, self.rank)
            if not synchronised and forward_outside:
                stack.enter_context(self.optimizer.no_sync())
            if bare:
                value.backward()
            else:
                self.optimizer.backward(value)
        reduced = {n: p.grad for n, p in self.plain.named_parameters()}
        for rank, local in enumerate(self._local):
            self._set_gradients(local)
            self._seed(rank)
            plain_value = loss(self.plain, rank)
            plain_value.backward()
            local.update(
                {n: p.grad for n, p in self.plain.named_parameters() if p.grad is not None}
            )
            if rank == self.rank:
                if is_exact:
                    assert_bit_equal({"loss": value}, {"loss": plain_value}, what=str(self.setting))
                else:
                    torch.testing.assert_close(value, plain_value, rtol=1e-5, atol=1e-6)
        if synchronised:
            for name, gradient in self._reduce().items():
                known = reduced[name]
                reduced[name] = gradient if known is None else known + gradient
        self._set_gradients(reduced)
        self._num_passes += 1

    def step(self) -> None:
        """Update both and forget the gradients."""
        self.optimizer.step()
        self.plain_optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients of both."""
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()
        self._local = [{} for _ in range(self.world_size)]

    def train(self, loss: Pass, *, num_steps: int = 3, bare: bool = False) -> None:
        """Take whole steps and compare everything after each."""
        for _ in range(num_steps):
            self.backward(loss, bare=bare)
            self.check_gradients()
            self.step()
            self.check()

    # ------------------------------------------------------------------ comparing

    def check_gradients(self) -> None:
        """Compare reduced gradients to the bit."""
        mine = full_gradients(self.model)
        assert_bit_equal(
            mine,
            {name: p.grad for name, p in self.plain.named_parameters() if name in mine},
            what=f"gradients, {self.setting}",
        )

    def check(self) -> None:
        """Compare parameters and optimizer state to the bit."""
        assert_bit_equal(
            parameters(self.model), parameters(self.plain), what=f"parameters, {self.setting}"
        )
        self.check_state()

    def check_state(self) -> None:
        """Compare the state that a plain optimizer would load; of no elements there is none."""
        expected = self.plain_optimizer.state_dict()
        members = [p for group in self.plain_optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(members):
            if not parameter.numel():
                expected["state"].pop(index, None)
        assert_same_state(self.optimizer.state_dict(), expected)

    # ------------------------------------------------------------------ inside

    def _seed(self, rank: int) -> None:
        """Seed one pass of one rank."""
        torch.manual_seed(1 + rank + 100 * self._num_passes)

    def _set_gradients(self, gradients: dict[str, Any]) -> None:
        """Put gradients, or None where there are none, into the twin."""
        for name, parameter in self.plain.named_parameters():
            parameter.grad = gradients.get(name)

    def _reduce(self) -> dict[str, Tensor]:
        """Add what the ranks hold in rank order and divide once; they then hold nothing."""
        runs = [
            _add_up(self._local[start : start + self.setting.run_size])
            for start in range(0, self.world_size, self.setting.run_size)
        ]
        self._local = [{} for _ in range(self.world_size)]
        dtypes = {name: p.dtype for name, p in self.plain.named_parameters()}
        return {
            name: (total / self.world_size).to(dtypes[name])
            for name, total in _add_up(runs).items()
        }


def _add_up(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add gradients in order, 16-bit ones in float32; a part without one adds nothing."""
    totals: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            wide = torch.promote_types(gradient.dtype, torch.float32)
            dense = gradient.to_dense().to(wide, copy=True)
            totals[name] = totals[name] + dense if name in totals else dense
    return totals


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters by name. Collective where a read of one would raise."""
    engine = model.__dict__.get(ATTRIBUTE)
    is_absent = engine is not None and engine.residence is not None
    if engine is not None and is_absent and engine.has_limit:  # they may not fit all at once
        state = model.state_dict()
        return {name: state[name].clone() for name, _ in model.named_parameters()}
    with sw.full_parameters(model) if is_absent else contextlib.nullcontext():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gather the gradients of sharded parameters by name, in their dtype. Collective."""
    named = {
        name: (p, sw.full_gradient(p))
        for name, p in model.named_parameters()
        if record_of(p) is not None
    }
    return {name: None if g is None else g.to(p.dtype) for name, (p, g) in named.items()}


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two optimizer state dicts: the same entries, groups, types and bits."""
    assert list(actual["state"]) == sorted(expected["state"]), "entries differ"
    for index, state in expected["state"].items():
        mine = actual["state"][index]
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        own = {k: v for k, v in mine.items() if isinstance(v, Tensor)}
        assert_bit_equal(own, tensors, what=f"state {index}")
        rest = {k: v for k, v in state.items() if k not in tensors}
        assert {k: v for k, v in mine.items() if k not in own} == rest, f"state {index}"
    assert actual["param_groups"] == expected["param_groups"]
