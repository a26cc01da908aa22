"""Rules such as 'two dims or more' choose the same parameters before and after sharding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, stages_of

if TYPE_CHECKING:
    from collections.abc import Callable


def _model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)) for _ in range(2)]
    return nn.Sequential(*blocks)


def _matrices(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in model.parameters() if p.ndim >= 2]


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 6)).square().mean()


class MatrixSGD(torch.optim.Optimizer):
    """Divides a matrix's gradient by its norm, and anything else's by nothing."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.shapes: list[tuple[int, ...]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.shapes = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.shapes.append(tuple(p.shape))
                grad = p.grad / p.grad.norm() if p.ndim >= 2 else p.grad
                p.add_(grad, alpha=-group["lr"])


def _matrix_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return MatrixSGD(model.parameters())


@pytest.mark.world_size(1, 2, 3, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_a_matrix_optimizer_sees_whole_matrices(face: Face) -> None:
    """Asked for whole parameters, every matrix is seen by exactly one rank, with its shape."""
    for stage in stages_of(face):
        setting = Setting(stage=stage, face=face, wrap={"atom": "parameter"})
        pair = Pair(_model, _matrix_sgd, setting=setting)
        wanted = sorted(_matrices(pair.plain))
        assert sorted(_matrices(pair.model)) == wanted
        pair.train(_loss, num_steps=2)
        seen: list[Any] = [None] * pair.world_size
        dist.all_gather_object(seen, pair.optimizer.unwrap().shapes)
        all_shapes = sorted(shape for shapes in seen for shape in shapes if len(shape) >= 2)
        assert all_shapes == sorted(wanted * (1 if stage else pair.world_size))


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim >= 2], lr=0.1)


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_muon_keeps_matrices_whole_by_itself(face: Face) -> None:
    for stage in stages_of(face):
        Pair(_model, _muon, setting=Setting(stage=stage, face=face)).train(_loss, num_steps=2)


@pytest.mark.world_size(2, timeout_s=20)
def test_shapes_survive_a_meta_build() -> None:
    for stage in STAGES:
        with torch.device("meta"):
            model = _model()
        wanted = _matrices(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        assert _matrices(sw.shard(model, stage=stage)) == wanted


class ThresholdSGD(torch.optim.Optimizer):
    """Keeps momentum in bfloat16 for parameters above a size, in float32 below."""

    def __init__(self, params: Any, lr: float = 0.1, threshold: int = 40) -> None:
        super().__init__(params, {"lr": lr, "threshold": threshold})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                half = p.numel() > group["threshold"]
                dtype = torch.bfloat16 if half else torch.float32
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p, dtype=dtype))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(momentum.float(), alpha=group["lr"])


@pytest.mark.world_size(1, 2, 4, timeout_s=20)
@pytest.mark.parametrize("chunk_bytes", [None, 256])
def test_size_thresholds_decide_alike_at_any_world_size(chunk_bytes: int | None) -> None:
    """54 elements are above the threshold whole and below it in pieces, so they must stay whole.

    An optimizer that looks at sizes has to say `atom="parameter"`: nothing in it tells the library.
    """
    for stage in STAGES:
        setting = Setting(
            stage=stage, shard={"chunk_bytes": chunk_bytes}, wrap={"atom": "parameter"}
        )
        pair = Pair(_model, lambda m: ThresholdSGD(m.parameters()), setting=setting)
        pair.train(_loss)
