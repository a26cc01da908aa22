"""Floating-point inputs get the working dtype, outputs float32 where asked for."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.compat.colossalai import ZeroDDP

Named = namedtuple("Named", "first second")


@dataclass
class Output:
    first: Tensor
    second: Tensor
    note: str = "kept"


class ModelOutput(OrderedDict):
    """A dict whose items are attributes as well, as outputs of transformers are."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


KINDS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda a, b: a + b.sum(), lambda out: [out]),
    "tuple": (lambda a, b: (a, b), list),
    "list": (lambda a, b: [a, b], list),
    "dict": (lambda a, b: {"first": a, "second": [b]}, lambda o: [o["first"], *o["second"]]),
    "named": (Named, list),
    "dataclass": (Output, lambda out: [out.first, out.second]),
    "model-output": (
        lambda a, b: ModelOutput(first=a, second=b),
        lambda out: [out.first, out.second, *out.values()],
    ),
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.seen: list[torch.dtype] = []
        self.layer, self.embedding = nn.Linear(3, 2), nn.Embedding(5, 3)

    def forward(self, x: Tensor, *, extra: dict[str, Tensor], tokens: Tensor) -> Any:
        self.seen = [x.dtype, extra["bias"].dtype, tokens.dtype]
        return KINDS[self.kind][0](self.layer(x), self.embedding(tokens) + extra["bias"])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("forces", [False, True])
def test_inputs_and_outputs_are_cast_inside_their_containers(forces: bool) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for kind, (make, read) in KINDS.items():
            model = ZeroDDP(Model(kind), None, False, forces, mixed_precision=dtype)
            bias = {"bias": torch.zeros(3)}
            output = model(torch.ones(2, 3), extra=bias, tokens=torch.arange(4))
            assert model.module.seen == [dtype, dtype, torch.int64]
            assert bias["bias"].dtype is torch.float32
            wanted = torch.float32 if forces else dtype
            assert {tensor.dtype for tensor in read(output)} == {wanted}, (kind, dtype)
            assert type(output) is type(make(torch.ones(1), torch.ones(1))), kind
            model.backward(sum(tensor.float().sum() for tensor in read(output)))


@pytest.mark.world_size(1)
def test_float16_is_the_default_and_none_keeps_every_dtype() -> None:
    assert {p.dtype for p in ZeroDDP(nn.Linear(3, 2)).parameters()} == {torch.float16}
    mixed = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.float64))
    model = ZeroDDP(mixed, mixed_precision=None)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2
