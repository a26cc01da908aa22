"""Parameters of zero elements keep their shape and take part in everything."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import FACES, STAGES, Face, Pair, Setting, stages_of


class _Model(nn.Module):
    """An empty layer, used with factor 0, before, between or after the others."""

    def __init__(self, place: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layers.insert(place, nn.Linear(4, 0, bias=False))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        nothing = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            y = layer(x)
            if y.shape[-1]:
                x = torch.tanh(y)
            else:
                nothing = nothing + 0.0 * y.sum()
        return x + nothing


def _loss(model: nn.Module, rank: int, *, dtype: torch.dtype) -> Tensor:
    return model(torch.randn(3, 4).to(dtype)).square().mean()


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("face", FACES)
def test_parameters_without_elements_are_harmless(face: Face, dtype: torch.dtype) -> None:
    for stage in stages_of(face):
        for place in (0, 1, 2):
            pair = Pair(partial(_Model, place, dtype), setting=Setting(stage=stage, face=face))
            expected = _shapes(pair.plain)
            assert _shapes(pair.model) == expected
            pair.train(partial(_loss, dtype=dtype), num_steps=2)
            assert _shapes(pair.model) == expected
            pair.model.load_state_dict(pair.plain.state_dict())
            pair.optimizer.load_state_dict(pair.optimizer.state_dict())
            assert _shapes(pair.model) == expected
            pair.train(partial(_loss, dtype=dtype), num_steps=1)


class _Nothing(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        return self.weight.sum() * 1.0


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.world_size(1, 2, timeout_s=20)
def test_a_model_of_nothing_but_empty_parameters_trains() -> None:
    for stage in STAGES:
        for shape in ((0,), (0, 8), (8, 0)):
            pair = Pair(partial(_Nothing, shape), setting=Setting(stage=stage))
            pair.train(lambda model, rank: model())
            assert pair.model.weight.shape == shape
