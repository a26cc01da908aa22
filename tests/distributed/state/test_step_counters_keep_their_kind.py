"""Step counters keep type, shape, dtype and device through saving and loading, fused ones too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, stages_of

if TYPE_CHECKING:
    from collections.abc import Callable

_KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), foreach=False),
    "adam-foreach": lambda m: torch.optim.Adam(m.parameters(), foreach=True),
    "adam-fused": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True, amsgrad=True),
    "sgd-fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adagrad-fused": lambda m: torch.optim.Adagrad(m.parameters(), fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
}


class _Model(nn.Module):
    """Includes parameters of one element, where a counter looks like a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.one + self.scalar


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("kind", _KINDS)
def test_step_counters_keep_their_kind(kind: str) -> None:
    """Left out: `capturable=True`, for which torch's Adam wants an accelerator."""
    for face in FACES:
        for stage in stages_of(face):
            setting = Setting(stage=stage, face=face)
            pair = Pair(_Model, _KINDS[kind], setting=setting)
            pair.train(_loss, num_steps=2)
            pair.optimizer.load_state_dict(pair.optimizer.state_dict())
            pair.check_state()
            for state in pair.optimizer.unwrap().state.values():
                tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
                assert all(v.device.type == "cpu" for v in tensors.values())
                assert "step" not in tensors or tensors["step"].shape == (), kind
            pair.train(_loss, num_steps=1)


class OddCounter(torch.optim.Optimizer):
    """Counts in an int, in a tensor of one element and in a 0-dim integer tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["int"] = 0
                    state["one"] = torch.zeros(1)
                    state["long"] = torch.zeros((), dtype=torch.long)
                    state["nothing"] = None
                state["int"] += 1
                state["one"] += 1
                state["long"] += 1
                p.sub_(p.grad, alpha=group["lr"] / state["one"].item())


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_counters_of_any_kind_survive(face: Face) -> None:
    """As in torch, whose own loading casts an integer counter that is not called step."""
    for stage in stages_of(face):
        pair = Pair(
            _Model, lambda m: OddCounter(m.parameters()), setting=Setting(stage=stage, face=face)
        )
        pair.train(_loss, num_steps=2)
        pair.check_state()
        pair.optimizer.load_state_dict(pair.optimizer.state_dict())
        pair.plain_optimizer.load_state_dict(pair.plain_optimizer.state_dict())
        pair.check_state()
        for state in pair.optimizer.unwrap().state.values():
            assert (state["one"].shape, state["long"].shape) == ((1,), ())
        pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
        pair.train(_loss, num_steps=1)


@pytest.mark.world_size(2, timeout_s=20)
def test_masters_survive_beside_fused_state() -> None:
    """bfloat16 weights with float32 masters and fused AdamW: save, load, go on to the same bits."""
    precision = sw.MixedPrecision(param_dtype=torch.bfloat16)
    for stage in STAGES:
        ends = []
        for interrupts in (False, True):
            model, optimizer = _half(stage, precision)
            _half_steps(model, optimizer)
            if interrupts:
                saved, weights = optimizer.state_dict(), model.state_dict()
                model, optimizer = _half(stage, precision)
                model.load_state_dict(weights)
                optimizer.load_state_dict(saved)
            _half_steps(model, optimizer)
            ends.append(optimizer.state_dict()["shardwise"]["masters"])
        assert all(torch.equal(ends[0][i], ends[1][i]) for i in ends[0])


def _half(stage: int, precision: sw.MixedPrecision) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = sw.shard(_Model(), stage=stage, mixed_precision=precision)
    return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))


def _half_steps(model: nn.Module, optimizer: Any) -> None:
    for step in range(2):
        torch.manual_seed(step)
        optimizer.backward(_loss(model, 0).float())
        optimizer.step()
        optimizer.zero_grad()
