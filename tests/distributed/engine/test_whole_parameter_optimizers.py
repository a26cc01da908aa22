"""Optimizers whose update looks at a whole parameter get whole parameters."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.runtime.engine import Engine
from tests.kit.models import Case
from tests.kit.oracle import assert_bit_equal
from tests.kit.sharded import Setting, assert_like_one_process, build

if TYPE_CHECKING:
    from shardwise.runtime.chunk import Chunk

BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)


def matrices() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)), nn.Linear(8, 4, False))


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(6, 8)).square().mean()


CASE = Case(name="matrices", build=matrices, loss=loss)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), lr=1e-2)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


class NormScaled(torch.optim.Optimizer):
    """A user's optimizer: the step of a parameter depends on its norm."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = parameter.norm() / (parameter.grad.norm() + 1e-8)
                    parameter.add_(parameter.grad * scale, alpha=-group["lr"])


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
@pytest.mark.parametrize("face", ["module", "optimizer"])
@pytest.mark.parametrize("make", [muon, adafactor])
def test_matrix_optimizers_are_bit_equal(make, face) -> None:
    for stage in (0, 1, 2):
        assert_like_one_process(CASE, make, Setting(stage=stage, face=face, num_steps=4))


@pytest.mark.world_size(2, 3)
def test_a_custom_optimizer_says_what_may_not_be_cut() -> None:
    setting = Setting(face="optimizer", options={"atom": "parameter"}, num_steps=3)
    assert_like_one_process(CASE, lambda m: NormScaled(m.parameters()), setting)


@pytest.mark.world_size(2)
def test_state_of_whole_parameters_travels_through_state_dicts() -> None:
    for make in (muon, adafactor):
        model, optimizer = build(CASE, make, Setting(face="optimizer"))
        optimizer.backward(loss(model))
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        other, second = build(CASE, make, Setting(face="optimizer"))
        second.load_state_dict(state)
        again = second.state_dict()
        assert again["state"].keys() == state["state"].keys() == set(range(6))
        for index, entry in state["state"].items():
            for name, value in entry.items():
                assert torch.equal(again["state"][index][name], value), (index, name)
        make(other).load_state_dict(state)


@pytest.mark.world_size(2)
def test_blocks_are_not_cut() -> None:
    model = nn.Linear(10, 40, bias=False)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), stage=2, atom=10)
    [piece] = optimizer.param_groups[0]["params"]
    assert piece.numel() % 10 == 0


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_move_to_other_cuts_chunk_by_chunk(stage: int, monkeypatch) -> None:
    """Masters that are whole all at once would be a plain float32 model on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    sw.shard(model, stage=stage, mixed_precision=BF16, chunk_bytes=1024)
    copies: list[int] = []
    real = Engine.gather_update

    def gather_update(engine: Engine, chunk: Chunk) -> torch.Tensor:
        kinds = (one for one in gc.get_objects() if type(one) is torch.Tensor)
        copies.append(sum(one.shape == (16, 16) and one.dtype == torch.float32 for one in kinds))
        return real(engine, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "gather_update", gather_update)
        optimizer = sw.ShardedOptimizer(torch.optim.Muon(model.parameters(), lr=0.0))
    assert len(copies) > 1
    assert set(copies) == {len(expected)}
    masters = optimizer.state_dict()["shardwise"]["masters"]
    assert_bit_equal(
        {str(i): masters[i] for i in range(4)}, {str(i): v for i, v in enumerate(expected)}
    )
