"""Every generator goes on where it was, after its state went through a file."""

from __future__ import annotations

import random

import numpy as np
import torch

from shardwise.checkpoint.entries import decode, encode
from shardwise.checkpoint.random_state import random_state, set_random_state

CPU = torch.device("cpu")


def _draw() -> list[float]:
    return [
        torch.rand(()).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def test_all_generators_go_on_where_they_were() -> None:
    _draw()  # the second of a pair of normal numbers waits in two of them
    state = decode("random", encode("random", random_state(CPU)))
    expected = _draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    set_random_state(state, CPU)
    assert _draw() == expected
