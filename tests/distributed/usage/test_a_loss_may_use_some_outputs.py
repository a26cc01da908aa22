"""A loss over some of the outputs leaves the rest of the model without gradient and update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.models import TwoOutputs
from tests.kit.pair import FACES, Face, Pair, Setting, full_gradients, stages_of


def _loss_over(*numbers: int) -> object:
    def loss(model: nn.Module, rank: int) -> Tensor:
        outputs = model(torch.randn(4, 6))
        return sum((outputs[number].square().mean() for number in numbers), torch.zeros(()))

    return loss


def _own_output(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(4, 6))[rank % 2].square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_a_loss_may_use_some_outputs(face: Face) -> None:
    for stage in stages_of(face):
        pair = Pair(TwoOutputs, setting=Setting(stage=stage, face=face))
        pair.backward(_loss_over(0))
        assert full_gradients(pair.model)["right.weight"] is None
        pair.check_gradients()
        pair.step()
        for loss in (_loss_over(1), _loss_over(0, 1), _own_output, _loss_over(0)):
            pair.train(loss, num_steps=1, bare=True)
