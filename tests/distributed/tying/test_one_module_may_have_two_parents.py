"""A sub-module that two parents own is sharded once, and both parents train it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, stages_of


class _Parent(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(4, 4), shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(self.own(x)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.a, self.b = _Parent(shared), _Parent(shared)


def _a_then_b(model: nn.Module, rank: int) -> Tensor:
    return model.b(model.a(torch.randn(3, 4))).square().mean()


def _b_then_a(model: nn.Module, rank: int) -> Tensor:
    return model.a(model.b(torch.randn(3, 4))).square().mean()


def _own_order(model: nn.Module, rank: int) -> Tensor:
    return (_b_then_a if rank else _a_then_b)(model, rank)


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_one_module_may_have_two_parents(face: Face) -> None:
    """The parents are called by themselves, not through the module that was sharded."""
    for stage in stages_of(face):
        pair = Pair(_Model, setting=Setting(stage=stage, face=face))
        for loss in (_a_then_b, _b_then_a, _own_order):
            pair.train(loss, num_steps=1, bare=True)


@pytest.mark.world_size(2, timeout_s=20)
def test_two_parents_sharded_apart_are_refused_before_anything_changes() -> None:
    for stage in STAGES:
        model = _Model()
        sw.shard(model.a, stage=stage)
        own = model.b.own.weight
        address = own.data_ptr()
        with pytest.raises(sw.ConfigurationError, match=r"shared\.weight"):
            sw.shard(model.b, stage=stage)
        assert own.data_ptr() == address
