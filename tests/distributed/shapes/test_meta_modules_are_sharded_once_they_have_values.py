"""Meta modules that nobody can initialise are refused; materialised, they may leave ranks empty."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import STAGES, Pair, Setting, stages_of


class _Experts(nn.Module):
    """Fewer rows than ranks; the name of its initialiser is not one that `shard` looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(1, 8, 8))
        self.rows = nn.Parameter(torch.randn(3, 8))

    def fill(self) -> None:
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.experts[0]) @ self.rows.T


def _materialised() -> nn.Module:
    with torch.device("meta"):
        model = _Experts()
    model.to_empty(device="cpu")
    model.fill()
    return model


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(2, 8)).square().mean()


@pytest.mark.world_size(2, 4, timeout_s=20)
def test_meta_modules_are_sharded_once_they_have_values() -> None:
    for stage in STAGES:
        with torch.device("meta"):
            model = _Experts()
        with pytest.raises(sw.ConfigurationError, match=r"_Experts.*init_fn"):
            sw.shard(model, stage=stage)
        if stage in stages_of("optimizer"):
            inner = torch.optim.SGD(model.parameters())
            with pytest.raises(sw.ConfigurationError, match=r"meta tensor.*to_empty"):
                sw.ShardedOptimizer(inner, stage=stage)
        model.to_empty(device="cpu")
        model.fill()
        sw.shard(model, stage=stage)
        for chunk_bytes in (None, 4):
            setting = Setting(stage=stage, shard={"chunk_bytes": chunk_bytes})
            Pair(_materialised, setting=setting).train(_loss, num_steps=2)
