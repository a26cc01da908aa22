"""Activation checkpointing of nested, repeated and shared parts gives the gradients without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, Pair, Setting, adamw, full_gradients, parameters


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class _Policy(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.entry = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.mean()


def _preference(model: nn.Module, rank: int) -> Tensor:
    chosen, rejected = model(torch.randn(3, 6)), model(torch.randn(3, 6))
    return -nn.functional.logsigmoid(chosen - rejected)


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_two_checkpointed_forwards_and_one_backward(use_reentrant: bool, bare: bool) -> None:
    """Reentrant recompute adds a parameter's two gradients one by one, so that rounding differs."""
    for stage in STAGES:
        for chunk_bytes in (None, 64):
            setting = Setting(stage=stage, shard={"chunk_bytes": chunk_bytes})
            pair = Pair(lambda: _Policy(use_reentrant), adamw, setting=setting)
            for _ in range(2):
                pair.backward(_preference, bare=bare)
                if use_reentrant:
                    _check_closely(pair)
                else:
                    pair.check_gradients()
                pair.step()
                pair.plain.load_state_dict(parameters(pair.model))


def _check_closely(pair: Pair) -> None:
    expected = {name: p.grad for name, p in pair.plain.named_parameters()}
    torch.testing.assert_close(full_gradients(pair.model), expected, rtol=1e-5, atol=1e-7)


class _Siamese(nn.Module):
    """One layer in two checkpointed segments, around one that is used once."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.entry, self.shared, self.middle = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for part in (self.shared, self.middle, self.shared):
            x = torch.tanh(checkpoint(part, x, use_reentrant=self.use_reentrant))
        return x


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 6)).square().mean()


@pytest.mark.world_size(2, 3, timeout_s=30)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_shared_layer_in_two_checkpointed_segments(use_reentrant: bool, bare: bool) -> None:
    """The total is reduced once, or late parts are reduced in a second round: never lost."""
    for stage in STAGES:
        for chunk_bytes in (None, 4):
            setting = Setting(stage=stage, shard={"chunk_bytes": chunk_bytes})
            pair = Pair(lambda: _Siamese(use_reentrant), adamw, setting=setting)
            for _ in range(2):
                for _ in range(2):
                    pair.backward(_loss, bare=bare)
                _check_closely(pair)
                pair.step()
                pair.plain.load_state_dict(parameters(pair.model))


class _LowRank(nn.Module):
    """A frozen norm and layer, and the trainable low-rank pair beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(16), nn.Linear(16, 16)
        self.norm.requires_grad_(False)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 3, bias=False), nn.Linear(3, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.base(x) + self.up(self.down(x))


class _FineTuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_LowRank() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, determinism_check="default")
        return x


def _fine_tuning(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 16, requires_grad=True)).square().mean()


@pytest.mark.world_size(2, timeout_s=20)
def test_frozen_weights_recompute_to_the_same_shapes() -> None:
    for stage in STAGES:
        pair = Pair(_FineTuned, adamw, setting=Setting(stage=stage))
        names = [n for n, p in pair.model.named_parameters() if not p.requires_grad]
        before = parameters(pair.model)
        pair.train(_fine_tuning, bare=True)
        after = parameters(pair.model)
        assert_bit_equal({n: after[n] for n in names}, {n: before[n] for n in names})
