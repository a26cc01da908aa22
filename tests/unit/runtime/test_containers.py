"""Nested values keep their types while their tensors are exchanged."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import torch

from shardwise.runtime.containers import cast_floating, map_tensors


class Pair(NamedTuple):
    x: torch.Tensor
    n: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    label: str = "a"

    def __post_init__(self) -> None:
        assert not hasattr(self, "seen")


class Output(collections.OrderedDict):
    """A dict subclass with an attribute, as model outputs are."""

    note = ""


def test_every_container_keeps_its_type() -> None:
    x = torch.ones(2)
    output = Output(x=x)
    output.note = "kept"
    value = {
        "list": [x, 1, None],
        "tuple": (x, "s"),
        "named": Pair(x, 3),
        "frozen": Frozen(x),
        "output": output,
        "int": torch.arange(2),
    }
    cast = cast_floating(value, torch.bfloat16)
    assert isinstance(cast["named"], Pair)
    assert isinstance(cast["frozen"], Frozen)
    assert type(cast["output"]) is Output
    assert cast["output"].note == "kept"
    for tensor in (cast["list"][0], cast["tuple"][0], cast["named"].x, cast["frozen"].x):
        assert tensor.dtype is torch.bfloat16
    assert cast["output"]["x"].dtype is torch.bfloat16
    assert cast["int"].dtype is torch.int64
    assert value["list"][0] is x
    assert value["frozen"].x is x


def test_values_without_a_change_are_the_same_objects() -> None:
    value = {"a": [torch.ones(1)], "b": (1, 2), "c": object()}
    assert map_tensors(lambda tensor: tensor, value) is value
