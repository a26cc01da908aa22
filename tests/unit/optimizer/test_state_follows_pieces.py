"""State that is no slice goes where its piece has gone, as torch puts it when it loads state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.optimizer.resting import RestingState


@pytest.mark.parametrize(
    ("options", "counter_device"),
    [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
)
def test_counters_follow_where_kernels_want_them(options, counter_device) -> None:
    """A fused kernel takes the counter on its device, in both directions."""
    record: Any = object()
    chunk: Any = SimpleNamespace(
        records=[record], own=SimpleNamespace(state=SimpleNamespace(is_in_memory=True))
    )
    start = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([start])
    optimizer.param_groups[0].update(options)
    optimizer.state[start] = {"step": torch.tensor(2.0), "row_var": torch.ones(2)}
    pieces = [start]
    resting = RestingState(optimizer, lambda _: pieces[0])
    for device in ("meta", "cpu", "meta"):
        moved = nn.Parameter(torch.zeros(3, device=device))
        optimizer.state[moved] = optimizer.state.pop(pieces[0])
        optimizer.param_groups[0]["params"] = pieces = [moved]
        if device == "cpu":  # meta tensors have no values to bring back
            optimizer.state[moved] = {"step": torch.tensor(2.0), "row_var": torch.ones(2)}
        resting.repoint(chunk)
        state = optimizer.state[moved]
        assert state["row_var"].device.type == device
        expected = counter_device if device == "meta" else "cpu"
        assert state["step"].device.type == expected
