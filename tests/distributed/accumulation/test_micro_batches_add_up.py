"""Every backward before a step counts, without any configuration of how many there will be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, Face, Pair, Setting, stages_of


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("face", FACES)
def test_micro_batches_add_up(face: Face, bare: bool) -> None:
    for stage in stages_of(face):
        pair = Pair(_model, setting=Setting(stage=stage, face=face))
        for num_micro_batches in (1, 3, 4, 2):
            for _ in range(num_micro_batches):
                pair.backward(_loss, bare=bare)
                pair.check_gradients()
            pair.step()
            pair.check()
