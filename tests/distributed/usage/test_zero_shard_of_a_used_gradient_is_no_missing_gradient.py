"""A parameter that some rank used is updated on every owner, also where its piece is all zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, UNEVEN_STAGES, Face, Pair, Setting, stages_of


def _first_rows(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randint(4, (5,))).square().mean()


def _on_rank_0_only(model: nn.Module, rank: int) -> Tensor:
    return _first_rows(model, rank) if rank == 0 else _nothing()


def _used_on_rank_0_only(model: nn.Module, rank: int) -> Tensor:
    loss = _first_rows(model, rank)
    return loss if rank == 0 else _nothing()


def _nothing() -> Tensor:
    return torch.zeros((), requires_grad=True) * 1.0


@pytest.mark.world_size(2, 3, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_zero_shard_of_a_used_gradient_is_no_missing_gradient(face: Face) -> None:
    """Rows 4-7 get no token: their moments, counter and decay must exist all the same."""
    for stage in stages_of(face):
        pair = Pair(lambda: nn.Embedding(8, 4), setting=Setting(stage=stage, face=face))
        pair.train(_first_rows)
        pair.train(_on_rank_0_only if stage in UNEVEN_STAGES else _used_on_rank_0_only)
        state = pair.optimizer.state_dict()["state"][0]
        assert state["step"] == 6
        assert not state["exp_avg"][4:].any()
