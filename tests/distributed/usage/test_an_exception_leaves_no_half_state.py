"""After an exception anywhere in a step, `zero_grad` makes the next step a fresh one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, UNEVEN_STAGES, Face, Pair, Setting, stages_of


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


class _Model(nn.Module):
    """Raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.fails: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 2 and self.fails == "forward":
                raise RuntimeError("out of memory")
            x = torch.tanh(layer(x))
            if number == 1 and self.fails == "backward":
                x = _Raise.apply(x)
        return x


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("fails", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("face", FACES)
def test_an_exception_leaves_no_half_state(face: Face, fails: str) -> None:
    """With gradients from a micro-batch before it, under both ways to call backward."""
    for stage in stages_of(face):
        for bare in (False, True):
            setting = Setting(stage=stage, face=face, shard={"chunk_bytes": 64})
            pair = Pair(_Model, setting=setting)
            pair.train(_loss, num_steps=1)
            pair.backward(_loss)
            with pytest.raises(RuntimeError, match="out of memory"):
                _fail(pair, fails, bare=bare)
            pair.model.fails = None
            pair.zero_grad()
            pair.train(_loss, num_steps=2, bare=bare)


def _fail(pair: Pair, fails: str, *, bare: bool) -> None:
    """Raise on every rank."""
    if fails == "optimizer":
        inner = pair.optimizer.unwrap()
        handle = inner.register_step_pre_hook(_refuse)
        try:
            pair.optimizer.step()
        finally:
            handle.remove()
        return
    pair.model.fails = fails
    loss = _loss(pair.model, pair.rank)
    loss.backward() if bare else pair.optimizer.backward(loss)


def _refuse(*_: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("by_module", [False, True])
def test_an_exception_on_one_rank_alone_is_survived_too(by_module: bool) -> None:
    """Rank 1 fails before its backward pass, rank 0 does not start one; both begin again."""
    for stage in UNEVEN_STAGES:
        pair = Pair(_Model, setting=Setting(stage=stage))
        pair.train(_loss, num_steps=1)
        if pair.rank == 1:
            pair.model.fails = "forward"
            with pytest.raises(RuntimeError, match="out of memory"):
                _loss(pair.model, 1)
            pair.model.fails = None
        else:
            _loss(pair.model, 0)
        if by_module:
            pair.model.zero_grad()
        pair.zero_grad()
        pair.train(_loss, num_steps=2)
