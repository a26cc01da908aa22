"""`parameter.grad = x` replaces all that came before, as in plain PyTorch; it is never added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import FACES, STAGES, Face, stages_of

if TYPE_CHECKING:
    from collections.abc import Callable


class _Three(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(3):
            setattr(self, f"p{index}", nn.Parameter(torch.zeros(4)))

    def forward(self, factor: float) -> Tensor:
        return sum(p.sum() * factor for p in self.parameters())


def _values(module: nn.Module) -> list[float]:
    with sw.full_parameters(module):
        return [p.detach()[0].item() for p in module.parameters()]


def _make(
    stage: int, face: Face = "module", **options: object
) -> tuple[nn.Module, sw.ShardedOptimizer]:
    module = _Three()
    inner = torch.optim.SGD(module.parameters(), lr=1.0)
    if face == "optimizer":
        return module, sw.ShardedOptimizer(inner, stage=stage)
    sw.shard(module, stage=stage, **options)
    return module, sw.ShardedOptimizer(inner)


def _assign(module: nn.Module, value: Callable[[nn.Parameter], Tensor] | float) -> None:
    """Replace the gradients of the first two parameters."""
    for index in range(2):
        parameter = getattr(module, f"p{index}")
        parameter.grad = torch.full((4,), value) if isinstance(value, float) else value(parameter)


def _pass(module: nn.Module, optimizer: sw.ShardedOptimizer, factor: float = 8.0) -> None:
    optimizer.backward(module(factor))


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_an_assigned_gradient_replaces_the_reduced_one(face: Face) -> None:
    for stage in stages_of(face):
        module, optimizer = _make(stage, face)
        _pass(module, optimizer)
        _assign(module, lambda parameter: sw.full_gradient(parameter) * 0.5)
        optimizer.step()
        assert _values(module) == [-4.0, -4.0, -8.0]


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("synchronised", [True, False], ids=["backward", "no_sync"])
def test_a_pass_after_an_assignment_adds_to_it(synchronised: bool) -> None:
    for stage in STAGES:
        module, optimizer = _make(stage)
        _pass(module, optimizer)
        _assign(module, 1.0)
        if synchronised:
            _pass(module, optimizer)
        else:
            with optimizer.no_sync():
                _pass(module, optimizer)
        optimizer.step()
        assert _values(module) == [-9.0, -9.0, -16.0]


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_an_assignment_after_a_local_pass_replaces_both() -> None:
    for stage in STAGES:
        module, optimizer = _make(stage)
        _pass(module, optimizer)
        with optimizer.no_sync():
            _pass(module, optimizer)
        _assign(module, 1.0)
        optimizer.step()
        assert _values(module) == [-1.0, -1.0, -16.0]


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_an_assignment_replaces_what_no_sync_keeps_in_a_wider_dtype() -> None:
    for stage in STAGES:
        precision = sw.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        module, optimizer = _make(stage, mixed_precision=precision)
        with optimizer.no_sync():
            _pass(module, optimizer)
        _assign(module, lambda p: torch.ones(4, dtype=p.dtype))
        optimizer.step()
        assert _values(module) == [-1.0, -1.0, -8.0]


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_local_passes_add_to_a_reduced_gradient() -> None:
    for stage in STAGES:
        module, optimizer = _make(stage)
        _pass(module, optimizer)
        with optimizer.no_sync():
            for _ in range(2):
                _pass(module, optimizer)
        _pass(module, optimizer, 0.0)
        optimizer.step()
        assert _values(module) == [-24.0] * 3


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_a_local_gradient_may_be_changed_in_place() -> None:
    for stage in STAGES:
        module, optimizer = _make(stage)
        _pass(module, optimizer)
        with optimizer.no_sync():
            _pass(module, optimizer)
        module.p0.grad.mul_(0.5)
        optimizer.step()
        assert _values(module) == [-12.0, -16.0, -16.0]


@pytest.mark.world_size(2, timeout_s=20)
def test_an_assignment_on_one_rank_replaces_on_all() -> None:
    for stage in STAGES:
        module, optimizer = _make(stage)
        _pass(module, optimizer)
        if dist.get_rank() == 1:
            _assign(module, 2.0)
        optimizer.step()
        assert _values(module) == [-1.0, -1.0, -8.0]


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_zeroing_gradients_zeroes_an_assigned_one() -> None:
    for stage in STAGES:
        module, optimizer = _make(stage)
        _pass(module, optimizer)
        _assign(module, 1.0)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert _values(module) == [0.0] * 3


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_an_assigned_gradient_is_free_of_weights() -> None:
    for stage in STAGES:
        module, optimizer = _make(stage)
        optimizer.backward(module(8.0), weight=2 + dist.get_rank())
        _assign(module, 1.0)
        optimizer.step()
        assert _values(module)[:2] == [-1.0, -1.0]


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_an_assigned_gradient_is_free_of_the_loss_scale() -> None:
    for stage in STAGES:
        module = _Three().half()
        scale = sw.LossScale(initial_scale=1024.0)
        sw.shard(module, stage=stage, mixed_precision=sw.MixedPrecision(loss_scale=scale))
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(module.parameters(), lr=1.0))
        _pass(module, optimizer)
        _assign(module, lambda parameter: sw.full_gradient(parameter).to(parameter.dtype) * 0.5)
        optimizer.step()
        assert _values(module) == [-4.0, -4.0, -8.0]
