"""deepcopy, AveragedModel and pickle give independent modules whose values are whole and newest."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import (
    FACES,
    STAGES,
    Face,
    Pair,
    Setting,
    has_values_outside,
    opened,
    parameters,
    stages_of,
)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 33), nn.BatchNorm1d(33), nn.Linear(33, 2))


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(4, 3)).square().mean()


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled, _saved])
@pytest.mark.parametrize("face", FACES)
def test_copies_of_a_sharded_module_are_plain(face: Face, duplicate: object) -> None:
    """Before a step, right after one, and with gradients pending: the copy trains by itself."""
    for stage in stages_of(face):
        pair = Pair(_model, setting=Setting(stage=stage, face=face))
        for moment in ("new", "stepped", "pending"):
            if moment == "stepped":
                pair.backward(_loss)
                pair.step()
            if moment == "pending":
                pair.backward(_loss)
            values = parameters(pair.plain)
            if not has_values_outside(stage):
                with pytest.raises(sw.ShardwiseError, match="full_parameters"):
                    duplicate(pair.model)
            with opened(pair.model, stage):
                copied = duplicate(pair.model)
            assert_bit_equal(parameters(copied), values, what=moment)
            assert all(type(p) is nn.Parameter for p in copied.parameters())
            copied.zero_grad()
            _loss(copied, 0).backward()
            torch.optim.SGD(copied.parameters(), lr=0.1).step()
            assert_bit_equal(parameters(pair.model), values, what=moment)
            if moment == "pending":
                pair.check_gradients()
                pair.step()
                pair.check()
        sw.shard(copied, stage=stage)  # a copy of a sharded module may be sharded itself


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_an_average_of_a_sharded_module_is_that_of_one_process(face: Face) -> None:
    for stage in stages_of(face):
        pair = Pair(_model, setting=Setting(stage=stage, face=face))
        with opened(pair.model, stage):
            averages = [
                AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
                for model in (pair.model, pair.plain)
            ]
        for _ in range(5):
            pair.backward(_loss)
            pair.step()
            with opened(pair.model, stage):
                averages[0].update_parameters(pair.model)
            averages[1].update_parameters(pair.plain)
        assert_bit_equal(parameters(averages[0]), parameters(averages[1]))
        pair.train(_loss, num_steps=1)


@pytest.mark.world_size(2, timeout_s=20)
def test_state_dicts_are_plain_and_can_be_pickled() -> None:
    """Nothing in them refers to a process group, and they do not change with the model."""
    for stage in STAGES:
        pair = Pair(_model, setting=Setting(stage=stage))
        pair.train(_loss, num_steps=1)
        saved = {"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()}
        restored = pickle.loads(pickle.dumps(saved))
        assert_bit_equal(restored["model"], pair.plain.state_dict() | _buffers(pair.model))
        assert all(type(value) is Tensor for value in restored["model"].values())
        plain = _model()
        plain.load_state_dict(restored["model"])
        torch.optim.AdamW(plain.parameters()).load_state_dict(restored["optimizer"])


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())
