"""What can be saved is what can be read back without running code."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.entries import decode, encode

GOOD = {
    "scalars": {"a": 1, "b": 2.5, "c": True, "d": None, "e": "text", "f": b"bytes", "g": 1 + 2j},
    "containers": [1, (2, [3]), {"a": {1, 2}}, OrderedDict(x=1)],
    "numpy-float": {"lr": 0.5},
}


@pytest.mark.parametrize("kind", GOOD)
def test_plain_values_come_back_equal(kind: str) -> None:
    assert decode(kind, encode(kind, GOOD[kind])) == GOOD[kind]


def test_numbers_of_numpy_come_back_as_plain_ones() -> None:
    (value,) = decode("lr", encode("lr", [np.float64(0.1)]))
    assert type(value) is float
    assert value == 0.1


def test_tensors_come_back_with_their_bits() -> None:
    tensor = torch.randn(3, 2).to(torch.bfloat16)
    assert torch.equal(decode("t", encode("t", {"t": tensor}))["t"], tensor)


@pytest.mark.parametrize(
    "value", [print, object(), torch.nn.Linear(1, 1), range(3)], ids=lambda v: type(v).__name__
)
def test_objects_are_refused_with_their_name(value: object) -> None:
    with pytest.raises(sw.CheckpointError, match="'mine' expected numbers, strings, tensors"):
        encode("mine", {"deep": [value]})
