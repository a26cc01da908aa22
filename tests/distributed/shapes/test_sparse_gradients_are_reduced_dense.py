"""Embeddings with sparse gradients train, unused ones are left alone, and SparseAdam is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, full_gradients, sgd, stages_of


class _Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Embedding(10, 32, sparse=True, padding_idx=0)
        self.unused = nn.Embedding(10, 32, sparse=True)


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model.used(torch.randint(10, (4,))).square().mean()


def _only_padding(model: nn.Module, rank: int) -> Tensor:
    return model.used(torch.zeros(4, dtype=torch.long)).square().mean()


def _padding_on_rank_0(model: nn.Module, rank: int) -> Tensor:
    return _loss(model, rank) if rank else _only_padding(model, rank)


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_sparse_gradients_are_reduced_dense(face: Face) -> None:
    """The twin's optimizer gets dense gradients too: momentum then moves rows without tokens."""
    for stage in stages_of(face):
        pair = Pair(_Embeddings, sgd, setting=Setting(stage=stage, face=face))
        for loss in (_loss, _only_padding, _padding_on_rank_0):
            pair.backward(loss)
            assert full_gradients(pair.model)["unused.weight"] is None
            assert pair.model.unused.weight.grad is None
            pair.check_gradients()
            pair.step()
            pair.check()
        pair.backward(_loss, synchronised=False)
        pair.backward(_loss)
        pair.check_gradients()


@pytest.mark.world_size(2, timeout_s=20)
def test_sparse_adam_is_refused_before_anything_changes() -> None:
    for stage in STAGES:
        model = _Embeddings()
        inner = torch.optim.SparseAdam(model.parameters())
        with pytest.raises(sw.ConfigurationError, match="SparseAdam"):
            sw.ShardedOptimizer(inner, stage=stage)
        sw.shard(model, stage=stage)
        with pytest.raises(sw.ConfigurationError, match="SparseAdam"):
            sw.ShardedOptimizer(inner)
        sw.ShardedOptimizer(sgd(model))
