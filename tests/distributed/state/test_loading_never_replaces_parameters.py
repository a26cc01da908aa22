"""`load_state_dict` copies into the chunks, whether or not it is asked to assign."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, parameters

if TYPE_CHECKING:
    from collections import OrderedDict


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3)))


def _state() -> OrderedDict[str, torch.Tensor]:
    torch.manual_seed(7)
    return _model().state_dict()


def _marks(state: OrderedDict[str, torch.Tensor]) -> list[str]:
    metadata = state._metadata  # type: ignore[attr-defined]
    return [name for name, own in metadata.items() if own.get("assign_to_params_buffers")]


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("is_marked", [False, True])
def test_loading_never_replaces_parameters(assign: bool, is_marked: bool) -> None:
    for stage in STAGES:
        model = sw.shard(_model(), stage=stage)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        members = list(model.parameters())
        state = _state()
        if is_marked:  # by a plain model that has taken the same dict
            with torch.device("meta"):
                _model().load_state_dict(state, assign=True)
            assert _marks(state)
        kept = {name: value.clone() for name, value in state.items()}
        model.load_state_dict(state, assign=assign)
        assert not _marks(state)
        assert all(a is b for a, b in zip(model.parameters(), members, strict=True))
        optimizer.backward(model(torch.randn(4, 5)).sum() * 0.0)
        optimizer.step()
        expected = {name: kept[name] for name, _ in model.named_parameters()}
        assert_bit_equal(parameters(model), expected)
        assert_bit_equal(dict(state), kept)


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_a_part_may_be_loaded_by_itself() -> None:
    for stage in STAGES:
        model = sw.shard(_model(), stage=stage)
        torch.manual_seed(3)
        state = nn.Linear(7, 3).state_dict()
        model[1][1].load_state_dict(state, assign=True)
        loaded = parameters(model)
        assert_bit_equal({name: loaded[f"1.1.{name}"] for name in state}, dict(state))


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("assign", [False, True])
def test_loading_keeps_the_dtype_and_refuses_another_shape(assign: bool) -> None:
    for stage in STAGES:
        model = sw.shard(_model(), stage=stage)
        state = _state()
        state["0.bias"] = state["0.bias"].double()
        model.load_state_dict(state, assign=assign)
        assert all(p.dtype is torch.float32 for p in model.parameters())
        before = parameters(model)
        state["0.weight"] = torch.ones(2, 2)
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            model.load_state_dict(state, assign=assign)
        assert torch.equal(parameters(model)["0.weight"], before["0.weight"])
