"""The global norm counts every logical gradient once: sharded, replicated, or under two names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import FACES, Face, Pair, Setting, adamw, stages_of


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.output = nn.Linear(8, 10, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, factor: float) -> Tensor:
        return (factor * self.embedding.weight).sum() + (factor * self.output.weight).sum()


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_a_tied_weight_counts_once(face: Face) -> None:
    """80 elements that two uses give sqrt(10) in total: the squares add up to 800, not 1600."""
    for stage in stages_of(face):
        pair = Pair(_Tied, adamw, setting=Setting(stage=stage, face=face))
        pair.optimizer.backward(pair.model(math.sqrt(10) / 2))
        assert pair.optimizer.clip_grad_norm_(1e9).item() == pytest.approx(math.sqrt(800), rel=1e-6)
        pair.optimizer.step()
        assert pair.optimizer.grad_norm == pytest.approx(math.sqrt(800), rel=1e-6)


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _same_on_every_rank(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 10).view(2, 5)).square().sum()


@pytest.mark.world_size(1, 2, 3, timeout_s=20)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_replicated_and_sharded_parts_of_one_model_count_once(norm_type: float) -> None:
    """One part at stage 0 beside one at stage 2, and one part left out of sharding altogether."""
    torch.manual_seed(0)
    plain = _two_layers()
    _same_on_every_rank(plain).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type=norm_type).item()

    torch.manual_seed(0)
    mixed = _two_layers()
    sw.shard(mixed[0], stage=0)
    sw.shard(mixed[2], stage=2)
    torch.manual_seed(0)
    partly = _two_layers()
    sw.shard(partly, stage=1, ignored=partly[0].parameters())
    for model in (mixed, partly):
        optimizer = sw.ShardedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), norm_type=norm_type
        )
        optimizer.backward(_same_on_every_rank(model))
        norm = optimizer.clip_grad_norm_(1e9, norm_type=norm_type).item()
        assert norm == pytest.approx(expected, rel=1e-6)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(expected, rel=1e-6)
