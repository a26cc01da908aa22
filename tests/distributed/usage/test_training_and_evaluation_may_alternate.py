"""Evaluation between, before or instead of training passes changes no training step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, Pair, Setting, parameters


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.1), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


def _evaluate(pair: Pair, how: str) -> None:
    context = torch.no_grad() if how == "no_grad" else torch.inference_mode()
    x = torch.ones(2, 5)
    pair.both(lambda model: model.eval())
    with context:
        assert_bit_equal({"out": pair.model(x)}, {"out": pair.plain(x)})
    pair.both(lambda model: model.train())


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_training_and_evaluation_may_alternate(how: str) -> None:
    for stage in STAGES:
        pair = Pair(_Model, setting=Setting(stage=stage))
        _loss(pair.model, 0)  # a forward pass that no backward follows
        parameters(pair.model)
        pair.train(_loss, num_steps=1)
        _loss(pair.model, 0)
        _evaluate(pair, how)
        pair.train(_loss, num_steps=1)
        _evaluate(pair, how)
        pair.backward(_loss)
        _evaluate(pair, how)  # between two micro-batches
        pair.backward(_loss)
        pair.step()
        _evaluate(pair, how)
        pair.train(_loss, num_steps=2)


@pytest.mark.world_size(2, timeout_s=20)
def test_evaluation_may_come_between_a_forward_and_its_backward() -> None:
    for stage in STAGES:
        pair = Pair(_Model, setting=Setting(stage=stage))

        def interrupted(model: nn.Module, rank: int) -> Tensor:
            loss = _loss(model, rank)
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 5))
            model.train()
            return loss

        pair.train(interrupted)


@pytest.mark.world_size(2, timeout_s=20)
def test_a_saliency_pass_in_eval_mode_leaves_no_gradient_pending() -> None:
    """Only the gradient of the input is asked for; training goes on as if nothing had happened."""
    for stage in STAGES:
        pair = Pair(_Model, setting=Setting(stage=stage))
        pair.train(_loss, num_steps=1)
        saliencies = []
        for model in (pair.model, pair.plain):
            model.eval()
            x = torch.ones(2, 5, requires_grad=True)
            (gradient,) = torch.autograd.grad(model(x).sum(), x)
            saliencies.append(gradient)
            model.train()
        torch.testing.assert_close(*saliencies, rtol=0, atol=0)
        pair.train(_loss, num_steps=2)
        pair.both(lambda model: model.eval().requires_grad_(False))
        for model in (pair.model, pair.plain):
            x = torch.ones(2, 5, requires_grad=True)
            model(x).sum().backward()
            saliencies.append(x.grad)
        torch.testing.assert_close(*saliencies[-2:], rtol=0, atol=0)
        pair.both(lambda model: model.train().requires_grad_(True))
        pair.train(_loss, num_steps=2)
