"""Gradients take the place of gathered values, but only of values that nobody needs again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.kit.pair import Pair, Setting, full_gradients, sgd


class Blocks(nn.Module):
    """Blocks whose pass is changed from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reads_detached = False
        self.recomputes = False
        self.repeats = 1

    def forward(self, x):
        for layer in self.layers:
            for _ in range(self.repeats):
                if self.reads_detached:  # its backward comes after the weight's gradient
                    x = F.linear(x, layer.weight.detach())
                    x = F.linear(x, layer.weight)
                elif self.recomputes:
                    x = checkpoint(layer, x, use_reentrant=True)
                else:
                    x = layer(x)
            x = torch.tanh(x)
        return x


def loss(model, rank):
    return model(torch.randn(3, 8, requires_grad=True)).square().mean()


def pair_of(build=Blocks, **shard) -> Pair:
    return Pair(build, sgd, setting=Setting(stage=3, shard=shard))


def watch_lending(pair, monkeypatch) -> list[bool]:
    """Note, for every chunk that is sent, whether its gradients lay over its values."""
    engine = pair.model._shardwise
    real, seen = engine.reducer.reduction.start, []

    def start(chunk):
        seen.append(chunk.is_lent)
        return real(chunk)

    monkeypatch.setattr(engine.reducer.reduction, "start", start)
    return seen


@pytest.mark.world_size(2, 3)
def test_no_second_buffer_from_the_second_pass_on(monkeypatch) -> None:
    pair = pair_of()
    seen = watch_lending(pair, monkeypatch)
    pair.train(loss, num_steps=3)
    assert not any(seen[:4])
    assert len(seen) == 12
    assert all(seen[4:])


@pytest.mark.world_size(2)
def test_values_that_are_needed_after_their_gradient_are_gathered_again() -> None:
    """The passes that taught the engine that it may lend were others."""
    pair = pair_of()
    pair.train(loss, num_steps=2)
    pair.both(lambda model: setattr(model, "reads_detached", True))
    pair.both(lambda model: setattr(model, "repeats", 2))
    pair.train(loss, num_steps=3)
    pair.both(lambda model: setattr(model, "reads_detached", False))
    pair.train(loss, num_steps=2)


@pytest.mark.world_size(2)
def test_recompute_finds_values_after_the_gradient_of_a_later_call() -> None:
    """Ranks are added up call by call then, which rounds in another order."""
    pair = pair_of()
    pair.train(loss, num_steps=2)
    pair.both(lambda model: setattr(model, "recomputes", True))
    pair.both(lambda model: setattr(model, "repeats", 2))
    pair.backward(loss)
    plain = dict(pair.plain.named_parameters())
    for name, gradient in full_gradients(pair.model).items():
        torch.testing.assert_close(gradient, plain[name].grad, rtol=1e-5, atol=1e-8)


@pytest.mark.world_size(2)
def test_a_chunk_that_was_asked_late_never_lends_again(monkeypatch) -> None:
    pair = pair_of()
    pair.both(lambda model: setattr(model, "reads_detached", True))
    seen = watch_lending(pair, monkeypatch)
    pair.train(loss, num_steps=2)
    pair.both(lambda model: setattr(model, "reads_detached", False))
    pair.train(loss, num_steps=2)
    assert not any(seen)


@pytest.mark.world_size(2)
def test_a_rank_without_a_gradient_sends_zeros_not_values() -> None:
    """Half of a block's parameters come with no gradient on one rank, then on the other."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}) for _ in range(3)
            )
            self.chosen = "ab"

        def forward(self, x):
            for layer in self.layers:
                for name in self.chosen:
                    x = torch.tanh(layer[name](x))
            return x

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Halves()])

        def forward(self, x, chosen):
            self.inner[0].chosen = chosen
            return self.inner[0](x)

    def loss_of(model, rank):
        chosen = ("ab", "a", "b", "ab")[(rank + model.turn) % 4]
        return model(torch.randn(3, 8), chosen).square().mean()

    pair = pair_of(Whole, units=[Halves])
    for turn in range(6):
        pair.both(lambda model, turn=turn: setattr(model, "turn", turn))
        pair.backward(loss_of)
        pair.check_gradients()
        pair.step()
        pair.check()


@pytest.mark.world_size(2)
def test_a_view_that_the_user_keeps_keeps_its_values() -> None:
    pair = pair_of()
    pair.train(loss, num_steps=2)
    kept: dict[nn.Module, torch.Tensor] = {}

    def keep(module, args) -> None:
        kept[module] = module.weight.detach()

    hooks = []
    pair.both(lambda m: hooks.append(m.layers[2].register_forward_pre_hook(keep)))
    pair.backward(loss)
    torch.testing.assert_close(
        kept[pair.model.layers[2]], kept[pair.plain.layers[2]], rtol=0, atol=0
    )
    pair.check_gradients()
    pair.step()
    pair.check()


@pytest.mark.world_size(2)
def test_a_read_inside_backward_sees_values_not_gradients() -> None:
    pair = pair_of()
    pair.train(loss, num_steps=2)
    read: dict[nn.Module, list[torch.Tensor]] = {pair.model: [], pair.plain: []}

    def loss_with_reads(model, rank):
        def note(grad) -> None:  # runs after the gradients of all later layers
            read[model] += [layer.weight.detach().clone() for layer in model.layers[1:]]

        x = torch.tanh(model.layers[0](torch.randn(3, 8)))
        x.register_hook(note)
        for layer in model.layers[1:]:
            x = torch.tanh(layer(x))
        return x.square().mean()

    pair.model.forward = lambda: loss_with_reads(pair.model, pair.rank)
    pair.plain.forward = lambda: loss_with_reads(pair.plain, pair.rank)
    for _ in range(2):
        pair.backward(lambda model, rank: model())
        pair.check_gradients()
        pair.step()
        pair.check()
    half = len(read[pair.model]) // 2
    assert half == 3
    for mine, plain in zip(read[pair.model][half:], read[pair.plain][-half:], strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=0)


@pytest.mark.world_size(2)
def test_an_error_amid_backward_costs_no_values() -> None:
    pair = pair_of()
    pair.train(loss, num_steps=2)
    model, optimizer = pair.model, pair.optimizer

    def fail(grad) -> None:
        raise RuntimeError("stop here")

    hook = model.layers[0].register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
    value = model(torch.ones(1, 8)).sum()
    with pytest.raises(RuntimeError, match="stop here"):
        optimizer.backward(value)
    hook.remove()
    pair.zero_grad()
    with sw.full_parameters(model):
        for mine, plain in zip(model.parameters(), pair.plain.parameters(), strict=True):
            torch.testing.assert_close(mine, plain, rtol=0, atol=0)
    pair.train(loss, num_steps=2)
