"""Outputs of any kind train alike, keep their type, and are cast inside it where asked for."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import STAGES, Pair, Setting

Named = namedtuple("Named", "first second")


@dataclass
class Plain:
    first: Tensor
    second: Tensor
    note: str = "kept"


@dataclass(frozen=True)
class Frozen:
    first: Tensor
    second: Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    first: Tensor
    second: Tensor


class Bag:
    """A type that nothing knows how to look into."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second


def _nested(first: Tensor, second: Tensor) -> dict[str, Any]:
    return {"a": [first, None, {"b": (second, 3)}], "c": None}


_KINDS: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "list": (lambda a, b: [a, b], lambda out: out),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: out.values()),
    "ordered": (lambda a, b: OrderedDict(a=a, b=b), lambda out: out.values()),
    "named": (Named, lambda out: out),
    "dataclass": (Plain, lambda out: (out.first, out.second)),
    "frozen": (Frozen, lambda out: (out.first, out.second)),
    "slotted": (Slotted, lambda out: (out.first, out.second)),
    "nested": (_nested, lambda out: (out["a"][0], out["a"][2]["b"][0])),
    "none-and-int": (lambda a, b: (a, None, 7, b), lambda out: (out[0], out[3])),
    "object": (Bag, lambda out: (out.first, out.second)),
}


class _Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        return _KINDS[self.kind][0](self.left(x), self.right(x))


@pytest.mark.world_size(2, timeout_s=30)
def test_outputs_may_be_any_container() -> None:
    for stage in STAGES:
        for kind, (make, read) in _KINDS.items():

            def loss(model: nn.Module, rank: int, read: Any = read) -> Tensor:
                return sum(t.square().mean() for t in read(model(torch.randn(4, 5))))

            pair = Pair(lambda kind=kind: _Model(kind), setting=Setting(stage=stage))
            pair.train(loss, num_steps=2, bare=True)
            assert type(pair.model(torch.randn(4, 5))) is type(make(None, None))


@pytest.mark.world_size(1, timeout_s=20)
def test_outputs_are_cast_inside_any_container() -> None:
    for kind in [kind for kind in _KINDS if kind != "object"]:
        precision = sw.MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        model = sw.shard(_Model(kind), stage=2, mixed_precision=precision)
        make, read = _KINDS[kind]
        output = model(torch.randn(4, 5))
        assert type(output) is type(make(None, None))
        assert [tensor.dtype for tensor in read(output)] == [torch.float32] * 2
