"""Parameters of one or two elements train at any depth and on more ranks than elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, Face, Pair, Setting, adamw, parameters, sgd, stages_of


class _Scales(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.tensor([0.25]))
        self.one_by_one = nn.Parameter(torch.tensor([[2.0]]))
        self.two = nn.Parameter(torch.tensor([1.0, -3.0]))
        self.inner = _Scales(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.one * self.one_by_one[0]
        return torch.tanh(x) + self.two.mean() * self.scalar


def _loss(model: nn.Module, rank: int) -> Tensor:
    return 100 * model(torch.randn(3)).square().mean()


@pytest.mark.world_size(1, 2, 4, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_tiny_parameters_train(face: Face) -> None:
    for stage in stages_of(face):
        for chunk_bytes in (None, 4):
            setting = Setting(stage=stage, face=face, shard={"chunk_bytes": chunk_bytes})
            pair = Pair(lambda: _Scales(2), setting=setting)
            before = parameters(pair.model)
            pair.train(_loss)
            for name, value in parameters(pair.model).items():
                assert (value != before[name]).all(), name


def _tiny_loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 1)).square().mean()


@pytest.mark.world_size(4, timeout_s=20)
@pytest.mark.parametrize("build_optimizer", [sgd, adamw])
@pytest.mark.parametrize("face", FACES)
def test_more_ranks_than_elements_train(face: Face, build_optimizer: object) -> None:
    """Three ranks own nothing at all; they save, load and clip like the fourth."""
    for stage in stages_of(face):
        setting = Setting(stage=stage, face=face)
        pair = Pair(lambda: nn.Linear(1, 1, bias=False), build_optimizer, setting=setting)
        pair.train(_tiny_loss)
        pair.optimizer.load_state_dict(pair.optimizer.state_dict())
        pair.backward(_tiny_loss)
        assert pair.optimizer.clip_grad_norm_(1e9) > 0
        pair.step()
        pair.check()
