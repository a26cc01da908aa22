"""How parameters are split over groups of equal options changes neither gradients nor updates."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import FACES, Face, Pair, Setting, parameters, stages_of

_WIDTHS = (5, 7, 9, 11, 7, 5, 3)


def _model() -> nn.Module:
    pairs = itertools.pairwise(_WIDTHS)
    layers = [layer for i, o in pairs for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers)


def _in_groups_of(size: int) -> object:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        members = list(model.parameters())
        groups = [{"params": members[i : i + size]} for i in range(0, len(members), size)]
        return torch.optim.AdamW(groups, lr=1e-2)

    return build


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_splitting_groups_changes_no_gradient(face: Face) -> None:
    for stage in stages_of(face):
        ends = []
        for size in (12, 6, 1):
            pair = Pair(_model, _in_groups_of(size), setting=Setting(stage=stage, face=face))
            pair.train(_loss)
            ends.append(parameters(pair.model))
        for end in ends[1:]:
            assert_bit_equal(end, ends[0])
