"""Freezing and unfreezing take effect at once, also after an evaluation, and norms follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, parameters, sgd, stages_of


def _model() -> nn.Module:
    layers = [nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers)


def _frozen_trunk() -> nn.Module:
    model = _model()
    _set_trunk(False)(model)
    return model


def _set_trunk(trainable: bool) -> object:
    def apply(model: nn.Module) -> None:
        model[0].requires_grad_(trainable)
        model[2].requires_grad_(trainable)

    return apply


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("face", FACES)
def test_a_trunk_may_be_unfrozen_and_frozen_again(face: Face, bare: bool) -> None:
    for stage in stages_of(face):
        pair = Pair(_frozen_trunk, setting=Setting(stage=stage, face=face))
        pair.train(_loss, num_steps=3, bare=bare)
        pair.both(_set_trunk(True))
        pair.train(_loss, num_steps=3, bare=bare)
        pair.both(_set_trunk(False))
        pair.train(_loss, num_steps=2, bare=bare)


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("starts_frozen", [False, True])
def test_unfreezing_after_an_evaluation_is_noticed(starts_frozen: bool) -> None:
    for stage in STAGES:
        pair = Pair(_frozen_trunk if starts_frozen else _model, setting=Setting(stage=stage))
        pair.both(_set_trunk(False))
        pair.train(_loss, num_steps=2)
        for model in (pair.model, pair.plain):
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 5))
            model.train()
        pair.both(_set_trunk(True))
        pair.train(_loss, num_steps=2)


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_norms_follow_a_parameter_that_is_frozen_every_other_step(face: Face) -> None:
    """Clipped, so a stale gradient in the norm would move every parameter."""
    for stage in stages_of(face):
        setting = Setting(stage=stage, face=face, wrap={"clip_grad_norm": 0.3})
        pair = Pair(_model, sgd, setting=setting)
        for step in range(6):
            pair.both(lambda model, step=step: model[0].requires_grad_(step % 2 == 0))
            pair.backward(_loss, is_exact=False)
            norm = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.3)
            pair.step()
            assert pair.optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-6)
            # the clip coefficient is a double here and a float32 in torch
            torch.testing.assert_close(
                parameters(pair.model), parameters(pair.plain), rtol=1e-5, atol=1e-6
            )
