"""What was tied stays tied through sharding, training, saving, loading and copying."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, Pair, Setting, opened, parameters


class _Model(nn.Module):
    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        if is_tied:
            self.tie()

    def tie(self) -> None:
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


def _loss(model: nn.Module, rank: int) -> Tensor:
    tokens = torch.randint(7, (6,))
    return nn.functional.cross_entropy(model(tokens), tokens.flip(0))


def _from_meta() -> nn.Module:
    """Materialising keeps the tie when it is made again, as transformers does."""
    with torch.device("meta"):
        model = _Model()
    model.to_empty(device="cpu")
    model.tie()
    torch.manual_seed(3)
    with torch.no_grad():
        model.embedding.weight.normal_()
    return model


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("build", [_Model, _from_meta])
def test_ties_outlive_sharding(build: object) -> None:
    for stage in STAGES:
        pair = Pair(build, setting=Setting(stage=stage))
        pair.train(_loss, num_steps=5)
        model = pair.model
        assert model.output.weight is model.embedding.weight
        assert len(pair.optimizer.state_dict()["state"]) == 1
        saved = model.state_dict()
        assert_bit_equal({"output": saved["output.weight"]}, {"output": saved["embedding.weight"]})
        with opened(model, stage):
            copied = copy.deepcopy(model)
        assert copied.output.weight is copied.embedding.weight
        model.load_state_dict({name: torch.ones_like(value) for name, value in saved.items()})
        assert model.output.weight is model.embedding.weight
        pair.plain.load_state_dict(saved | {n: torch.ones(7, 4) for n in saved})
        pair.train(_loss, num_steps=2)


@pytest.mark.world_size(2, timeout_s=20)
def test_a_tie_made_after_sharding_holds() -> None:
    """The weight that the tie replaced is no longer part of the model: nothing updates it."""
    for stage in STAGES:
        torch.manual_seed(0)
        model = sw.shard(_Model(is_tied=False), stage=stage)
        replaced = nn.ParameterList([model.output.weight])
        before = parameters(model)["output.weight"]
        model.tie()
        optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        plain = _Model()
        plain.load_state_dict(model.state_dict())
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for step in range(5):
            for one in (model, plain):  # the same data on all ranks: their mean is each of them
                torch.manual_seed(step)
                _loss(one, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            assert_bit_equal(parameters(model), parameters(plain))
        assert len(optimizer.state_dict()["state"]) == 1
        with opened(replaced, stage):
            assert_bit_equal({"replaced": replaced[0]}, {"replaced": before})
