"""Weights loaded into a 16-bit model are what its float32 masters continue from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import (
    FACES,
    STAGES,
    Face,
    has_values_outside,
    opened,
    parameters,
    stages_of,
)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 5).to(model[0].weight.dtype)).float().square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("face", FACES)
def test_loaded_weights_reach_the_masters(face: Face, dtype: torch.dtype) -> None:
    """All weights, then a part, before any step and after one; a step at rate 0 keeps them."""
    scale = sw.LossScale(initial_scale=8.0)
    precision = sw.MixedPrecision(param_dtype=dtype, loss_scale=scale)
    for stage in stages_of(face):
        model = _model()
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        if face == "module":
            sw.shard(model, stage=stage, mixed_precision=precision)
            optimizer = sw.ShardedOptimizer(inner)
        else:
            optimizer = sw.ShardedOptimizer(inner, stage=stage, mixed_precision=precision)
        for has_stepped in (False, True):
            for names in (None, ("0.weight", "2.bias")):
                torch.manual_seed(20 + has_stepped)
                new = {n: torch.randn(p.shape) for n, p in model.named_parameters()}
                kept = {} if names is None else parameters(model)
                subset = new if names is None else {n: new[n] for n in names}
                model.load_state_dict(subset, strict=names is None)
                expected = {**kept, **{n: v.to(dtype) for n, v in subset.items()}}
                assert_bit_equal(parameters(model), expected)
                optimizer.param_groups[0]["lr"] = 0.0
                optimizer.backward(_loss(model))
                optimizer.step()
                optimizer.zero_grad()
                assert not optimizer.last_step_skipped
                assert_bit_equal(parameters(model), expected, what=f"stage {stage}")
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.backward(_loss(model))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("how", ["copy_", "data.copy_", "data="])
def test_values_written_by_hand_reach_the_masters(how: str) -> None:
    """Behind autograd's back only after `refresh_master_parameters`, as its documentation says.

    Where parameters are sharded, `copy_` stores the owned piece; `.data` needs `full_parameters`.
    """
    precision = sw.MixedPrecision(param_dtype=torch.bfloat16)
    for stage in STAGES:
        torch.manual_seed(0)
        model = sw.shard(_model(), stage=stage, mixed_precision=precision)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.backward(_loss(model))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.0
        value = torch.full((7, 5), 0.375, dtype=torch.bfloat16)
        if how == "copy_":
            _write(model[0].weight, value, how)
        else:
            if not has_values_outside(stage):
                with pytest.raises(sw.ShardwiseError, match="full_parameters"):
                    _write(model[0].weight, value, how)
            with opened(model, stage, writeback=True):
                _write(model[0].weight, value, how)
        if how == "data.copy_":
            optimizer.refresh_master_parameters()
        optimizer.backward(_loss(model))
        optimizer.step()
        after = parameters(model)["0.weight"]
        assert_bit_equal({"weight": after}, {"weight": value}, what=f"stage {stage}")


def _write(weight: nn.Parameter, value: Tensor, how: str) -> None:
    if how == "copy_":
        with torch.no_grad():
            weight.copy_(value)
    elif how == "data.copy_":
        weight.data.copy_(value)
    else:
        weight.data = value.clone()
