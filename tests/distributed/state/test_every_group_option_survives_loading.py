"""Loading restores every option of every group, whatever the new optimizer was built with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import FACES, Face, assert_same_state, stages_of


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(3, 3))


def _groups(model: nn.Module, *, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"params": list(layer.parameters()), **own}
        for layer, own in zip(model, options, strict=True)
    ]


_SAVED = [
    {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "name": "trunk", "custom": None},
    {"lr": 0.02, "betas": (0.7, 0.99), "eps": 1e-6, "amsgrad": True, "custom": [1, (2, 3)]},
    {"lr": 0.03, "maximize": True, "foreach": False, "custom": {"a": 1.5}},
    {"lr": 0.04, "custom": True},
]
_OTHER = [{"lr": 0.1}] * 4


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 5)).square().mean()


def _make(face: Face, stage: int, options: list[dict[str, Any]]) -> Any:
    model = _model()
    inner = torch.optim.AdamW(_groups(model, options=options), lr=0.5)
    return model, _wrap(face, stage, model, inner)


def _wrap(face: Face, stage: int, model: nn.Module, inner: torch.optim.Optimizer) -> Any:
    if face == "module":
        sw.shard(model, stage=stage)
        return sw.ShardedOptimizer(inner)
    return sw.ShardedOptimizer(inner, stage=stage)


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_every_group_option_survives_loading(face: Face) -> None:
    for stage in stages_of(face):
        model, optimizer = _make(face, stage, _SAVED)
        optimizer.backward(_loss(model))
        optimizer.step()
        saved = optimizer.state_dict()
        new_model, new = _make(face, stage, _OTHER)
        new_model.load_state_dict(model.state_dict())
        new.load_state_dict(saved)
        assert_same_state(new.state_dict(), saved)
        for group, options in zip(new.param_groups, _SAVED, strict=True):
            assert {key: group[key] for key in options} == options
        for one, its in ((model, optimizer), (new_model, new)):
            its.zero_grad()
            its.backward(_loss(one))
            its.step()
        assert_same_state(new.state_dict(), optimizer.state_dict())


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_empty_groups_survive_loading(face: Face) -> None:
    """torch refuses to build an empty group, but a group may become one, and files contain them."""
    for stage in stages_of(face):
        model = _model()
        groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.7}]
        optimizer = _wrap(face, stage, model, torch.optim.AdamW(groups, lr=0.1))
        optimizer.backward(_loss(model))
        optimizer.step()
        saved = optimizer.state_dict()
        assert saved["param_groups"][1]["params"] == []
        optimizer.param_groups[1]["lr"] = 0.1
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[1]["lr"] == 0.7
