"""State that exists comes back, also of parameters that are frozen by then; none is made up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, parameters, stages_of


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))


def _first_only(model: nn.Module, rank: int) -> Tensor:
    return model[0](torch.randn(3, 2)).square().mean()


def _whole(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 2)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_state_of_frozen_parameters_survives_loading(face: Face) -> None:
    """The first parameter has moments and is frozen, the second has never been stepped."""
    for stage in stages_of(face):
        setting = Setting(stage=stage, face=face)
        pair = Pair(_model, setting=setting)
        pair.train(_first_only, num_steps=2)
        pair.both(lambda model: model[0].requires_grad_(False))
        saved = pair.optimizer.state_dict()
        assert set(saved["state"]) == {0}

        resumed = Pair(_model, setting=setting)
        resumed.both(lambda model: model[0].requires_grad_(False))
        resumed.both(lambda model, pair=pair: model.load_state_dict(parameters(pair.model)))
        resumed.optimizer.load_state_dict(saved)
        resumed.plain_optimizer.load_state_dict(pair.plain_optimizer.state_dict())
        resumed.check()
        resumed.train(_whole, num_steps=1)
        resumed.both(lambda model: model[0].requires_grad_(True))
        resumed.train(_whole, num_steps=2)


@pytest.mark.world_size(2, 3, timeout_s=20)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_interleaved_groups_and_stateless_optimizers_have_plain_entries(momentum: float) -> None:
    """Even and odd parameters in two groups; without momentum SGD keeps no state at all."""

    def interleaved(model: nn.Module) -> torch.optim.Optimizer:
        members = list(model.parameters())
        groups = [{"params": members[0::2]}, {"params": members[1::2], "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.1, momentum=momentum)

    for stage in STAGES:
        pair = Pair(
            lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)),
            interleaved,
            setting=Setting(stage=stage),
        )
        pair.train(_whole, num_steps=2)
        pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
        pair.train(_whole, num_steps=1)
