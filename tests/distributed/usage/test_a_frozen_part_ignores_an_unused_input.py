"""A frozen part that is handed a tensor it does not use does no backward work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, Face, Pair, Setting, stages_of


class _FrozenLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = _FrozenLinear(), nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        hidden = self.frozen(a, b)
        assert not hidden.requires_grad
        return self.trained(hidden)


def _loss(model: nn.Module, rank: int) -> Tensor:
    unused = torch.randn(3, 4, requires_grad=True)
    return model(torch.randn(3, 4), unused).square().mean()


def _only_trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_a_frozen_part_ignores_an_unused_input(face: Face) -> None:
    for stage in stages_of(face):
        pair = Pair(_Model, _only_trainable, setting=Setting(stage=stage, face=face))
        pair.train(_loss, bare=True)
