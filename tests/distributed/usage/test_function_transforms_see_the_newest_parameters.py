"""`torch.func` works on a sharded model, right after a step too, while its updates travel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import STAGES, Pair, Setting

# torch's own forward-mode rules are still scripted
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(4, 3)).square().mean()


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_function_transforms_see_the_newest_parameters() -> None:
    for transform in ("jvp", "vmap", "grad", "functional_call", "jacrev"):
        for stage in STAGES:
            pair = Pair(_model, setting=Setting(stage=stage))
            for _ in range(2):
                results = []
                for model in (pair.model, pair.plain):
                    torch.manual_seed(1)
                    results.append(_apply(transform, model))
                torch.testing.assert_close(*results, rtol=0, atol=0)
                pair.backward(_loss)
                pair.step()


def _apply(transform: str, model: nn.Module) -> object:
    x = torch.randn(4, 3)
    if transform == "jvp":
        return torch.func.jvp(model, (x,), (torch.ones_like(x),))
    if transform == "vmap":
        return torch.func.vmap(model)(x)
    if transform == "grad":
        return torch.func.grad(lambda value: model(value).sum())(x)
    if transform == "jacrev":
        return torch.func.jacrev(model)(x)
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,))


@pytest.mark.world_size(2, timeout_s=20)
def test_a_transform_of_a_bfloat16_model_differentiates_its_forward() -> None:
    precision = sw.MixedPrecision(param_dtype=torch.bfloat16)
    for stage in STAGES:
        torch.manual_seed(0)
        model = sw.shard(_model(), stage=stage, mixed_precision=precision)
        torch.manual_seed(0)
        plain = _model().bfloat16()
        x = torch.randn(4, 3)
        mine = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        half = x.bfloat16()
        theirs = torch.func.jvp(plain, (half,), (torch.ones_like(half),))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
