"""How often a part of the model is called may depend on a rank's data.

Where parameters are sharded, the part lies in a larger unit that all ranks call.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, UNEVEN_STAGES, Face, Pair, Setting, stages_of


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 5)

    def forward(self, x: Tensor, num_calls: int) -> Tensor:
        x = torch.tanh(self.body(x))
        for _ in range(num_calls):
            x = torch.tanh(self.head(x))
        return x


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5), 1 + 2 * rank).square().mean()


def _never_on_rank_0(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5), rank).square().mean()


def _never(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5), 0).square().mean()


@pytest.mark.world_size(2, 3, timeout_s=20)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("face", FACES)
def test_calls_of_a_part_may_differ_over_ranks(face: Face, bare: bool) -> None:
    for stage in stages_of(face):
        for chunk_bytes in (None, 4):
            units = {} if stage in UNEVEN_STAGES else {"units": [_Model]}
            shard = {"chunk_bytes": chunk_bytes, **units}
            setting = Setting(stage=stage, face=face, shard=shard)
            pair = Pair(_Model, setting=setting)
            for loss in (_loss, _never_on_rank_0, _never, _loss):
                pair.train(loss, num_steps=1, bare=bare)
