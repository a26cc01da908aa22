"""`retain_graph`, `torch.autograd.grad` and several forwards before a backward act as in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, Pair, Setting, adamw, full_gradients


class _Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(-1)


class _RankMean:
    """Gradients of every rank's data on a plain model, added in rank order and divided once."""

    def __init__(self, model: nn.Module, data: list[Tensor]) -> None:
        self.model, self.data = model, data

    def gradients(self, loss: object) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        of_ranks = [
            torch.autograd.grad(loss(self.model(x)), list(named.values())) for x in self.data
        ]
        total = [
            sum(parts[1:], parts[0].clone()) / len(of_ranks)
            for parts in zip(*of_ranks, strict=True)
        ]
        return dict(zip(named, total, strict=True))


def _first(output: Tensor) -> Tensor:
    return output[:, 0].mean()


def _second(output: Tensor) -> Tensor:
    return output[:, 1].square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("grad_between", [False, True])
def test_one_graph_may_run_backward_twice(bare: bool, grad_between: bool) -> None:
    for stage in STAGES:
        pair = Pair(_Classifier, adamw, setting=Setting(stage=stage))
        data = [torch.full((3, 2), 1.0 + rank) for rank in range(pair.world_size)]
        expected = _RankMean(pair.plain, data)
        output = pair.model(data[pair.rank])

        def run(loss: Tensor, *, retain: bool, pair: Pair = pair) -> None:
            if bare:
                loss.backward(retain_graph=retain)
            else:
                pair.optimizer.backward(loss, retain_graph=retain)

        run(_first(output), retain=True)
        assert_bit_equal(full_gradients(pair.model), expected.gradients(_first))
        if grad_between:
            mine = torch.autograd.grad(
                _second(output), list(pair.model.parameters()), retain_graph=True
            )
            plain = _second(pair.plain(data[pair.rank]))
            theirs = torch.autograd.grad(plain, list(pair.plain.parameters()))
            assert_bit_equal(dict(enumerate(mine)), dict(enumerate(theirs)))
            assert_bit_equal(full_gradients(pair.model), expected.gradients(_first))
        pair.optimizer.zero_grad()
        run(_second(output), retain=False)
        assert_bit_equal(full_gradients(pair.model), expected.gradients(_second))


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("order", ["first", "last", "joined"])
def test_two_forwards_may_come_before_their_backwards(order: str, bare: bool) -> None:
    """Each backward pass is reduced by itself, so the sum is one of two means."""
    for stage in STAGES:
        pair = Pair(_two_layers, adamw, setting=Setting(stage=stage))
        for _ in range(2):
            torch.manual_seed(5)
            x = torch.randn(2, pair.world_size, 3, 10)
            losses = [pair.model(x[i, pair.rank]).square().mean() for i in range(2)]
            passes = {"first": losses, "last": losses[::-1], "joined": [losses[0] + losses[1]]}
            for loss in passes[order]:
                loss.backward() if bare else pair.optimizer.backward(loss)
            for i in range(2):
                for rank in range(pair.world_size):
                    (pair.plain(x[i, rank]).square().mean() / pair.world_size).backward()
            theirs = {name: p.grad for name, p in pair.plain.named_parameters()}
            # the order of the four additions differs
            torch.testing.assert_close(full_gradients(pair.model), theirs, rtol=1e-5, atol=1e-6)
            pair.optimizer.step()
            pair.optimizer.zero_grad()
            pair.plain.load_state_dict(pair.model.state_dict())
            pair.plain.zero_grad()
