"""Nothing moves and no state exists until the user steps; the first update is torch's first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import FACES, Face, Pair, Setting, parameters, stages_of

_KINDS = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
    ),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_wrapping_takes_no_step(face: Face) -> None:
    """Adagrad makes its state when it is built: that is kept, and nothing is added."""
    for kind in _KINDS:
        for stage in stages_of(face):
            pair = Pair(_model, _KINDS[kind], setting=Setting(stage=stage, face=face))
            assert_bit_equal(parameters(pair.model), parameters(pair.plain))
            pair.check_state()
            pair.step()  # without any gradient
            pair.check()
            pair.train(_loss, num_steps=2)
