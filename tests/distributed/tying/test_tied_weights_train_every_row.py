"""A tied weight whose rows do not divide by the world size trains in every row."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, parameters, sgd, stages_of


class _Tied(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4)
        self.output = nn.Linear(4, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


def _all_tokens(model: nn.Module, rank: int) -> Tensor:
    vocabulary = model.embedding.num_embeddings
    tokens = torch.randperm(vocabulary)
    return nn.functional.cross_entropy(model(tokens), tokens.flip(0))


@pytest.mark.world_size(2, 4, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_tied_weights_train_every_row(world_size: int, face: Face) -> None:
    vocabulary = {2: 5, 4: 10}[world_size]
    for stage in stages_of(face):
        pair = Pair(lambda: _Tied(vocabulary), sgd, setting=Setting(stage=stage, face=face))
        before = parameters(pair.model)["embedding.weight"]
        pair.train(_all_tokens)
        after = parameters(pair.model)["embedding.weight"]
        assert (before != after).any(1).all()
        assert pair.model.output.weight is pair.model.embedding.weight


@pytest.mark.world_size(2, timeout_s=20)
def test_parts_of_one_tie_cannot_be_sharded_apart() -> None:
    """Each wrapped by itself, one weight would have two owners: the second call is refused."""
    for stage in STAGES:
        model = _Tied(5)
        sw.shard(model.embedding, stage=stage)
        with pytest.raises(sw.ConfigurationError, match=r"weight.*sharded one.*shard it once"):
            sw.shard(model.output, stage=stage)
        optimizer = sw.ShardedOptimizer(sgd(model))
        optimizer.backward(_all_tokens(model, dist.get_rank()))
        optimizer.step()
