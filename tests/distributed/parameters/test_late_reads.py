"""A value may be read after its gradient has come, by one rank alone too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.kit.pair import Pair, Setting, sgd


class Blocks(nn.Module):
    """Layers that some rank reads in another way from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.is_odd = False

    def forward(self, x):
        for layer in self.layers:
            if self.is_odd:  # its backward comes after the weight's gradient
                x = F.linear(x, layer.weight.detach())
            x = torch.tanh(layer(x))
        return x


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("who", ["all", "first"])
def test_a_detached_use_that_starts_late(who) -> None:
    def loss(model, rank):
        model.is_odd = step > 1 and (who == "all" or rank == 0)
        return model(torch.randn(3, 8)).square().mean()

    pair = Pair(Blocks, sgd, setting=Setting(stage=3))
    for step in range(5):  # noqa: B007 - read by the loss
        pair.backward(loss)
        pair.check_gradients()
        pair.step()
        pair.check()


@pytest.mark.world_size(2)
def test_a_hook_that_logs_a_weight_on_one_rank() -> None:
    pair = Pair(Blocks, sgd, setting=Setting(stage=3))
    logged: list[torch.Tensor] = []
    if pair.rank == 0:
        weight = pair.model.layers[1].weight
        weight.register_post_accumulate_grad_hook(lambda p: logged.append(p.detach().norm()))
    for _ in range(4):
        expected = pair.plain.layers[1].weight.detach().norm()
        pair.backward(lambda model, rank: model(torch.randn(3, 8)).square().mean())
        if pair.rank == 0:
            torch.testing.assert_close(logged[-1], expected, rtol=0, atol=0)
        pair.step()
        pair.check()
