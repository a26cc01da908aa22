"""bfloat16, float32 and float64 parameters of one module keep their dtypes and updates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, Face, Pair, Setting, stages_of


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7).bfloat16()
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(3, 7, dtype=torch.float64))
        self.last = nn.Linear(7, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x.bfloat16()).float())
        return self.last((x * self.scale).bfloat16())


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).float().square().mean()


@pytest.mark.world_size(1, 2, 3, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_one_module_may_mix_dtypes(face: Face) -> None:
    for stage in stages_of(face):
        pair = Pair(_Mixed, setting=Setting(stage=stage, face=face))
        dtypes = {name: p.dtype for name, p in pair.plain.named_parameters()}
        for _ in range(2):
            pair.backward(_loss)
            assert {n: p.dtype for n, p in pair.model.named_parameters()} == dtypes
            assert {n: p.grad.dtype for n, p in pair.model.named_parameters()} == dtypes
            pair.check_gradients()
            pair.step()
            pair.check()
