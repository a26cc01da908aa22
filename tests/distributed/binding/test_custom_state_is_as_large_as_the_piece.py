"""State made from `p.shape`, `zeros_like(p)` or `p.size()` has the size of the rank's piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.kit.pair import FACES, Face, Pair, Setting, stages_of

if TYPE_CHECKING:
    from collections.abc import Callable


class HoardingSGD(torch.optim.Optimizer):
    """Keeps the last gradient three times over, each made in another usual way."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["by_shape"] = torch.zeros(p.shape)
                    state["by_like"] = torch.zeros_like(p)
                    state["by_size"] = torch.empty(p.size())
                    state["count"] = 0
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.copy_(p.grad)
                state["count"] += 1
                p.sub_(state["by_shape"], alpha=group["lr"])


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 9)).square().mean()


@pytest.mark.world_size(1, 2, 3, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_custom_state_is_as_large_as_the_piece(face: Face) -> None:
    """`state_dict` has every state in the parameter's shape again, and loads it back."""
    for atom in ("element", "parameter", 4):
        for stage in stages_of(face):
            setting = Setting(stage=stage, face=face, wrap={"atom": atom})
            pair = Pair(_model, lambda m: HoardingSGD(m.parameters()), setting=setting)
            pair.train(_loss, num_steps=2)
            state = pair.optimizer.unwrap().state.values()
            numel = torch.tensor([s["by_shape"].numel() for s in state], dtype=torch.long).sum()
            dist.all_reduce(numel)
            whole = sum(p.numel() for p in pair.model.parameters())
            assert numel == whole * (1 if stage else pair.world_size)
            pair.optimizer.load_state_dict(pair.optimizer.state_dict())
            pair.train(_loss, num_steps=1)
