"""Names are those of the bare model, whatever it is wrapped in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw
from shardwise.checkpoint.contents import Contents

if TYPE_CHECKING:
    from pathlib import Path


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def _names(model: nn.Module) -> list[str]:
    return [name for named in Contents(model).tensors for name in named.names]


def test_wrappers_leave_no_trace_in_names() -> None:
    expected = _names(_model())
    assert set(expected) == set(_model().state_dict())
    inner, outer = _model(), _model()
    inner[1][0] = checkpoint_wrapper(inner[1][0])
    assert _names(inner) == expected
    outer[1] = checkpoint_wrapper(outer[1])
    outer[0] = torch.compile(outer[0], backend="eager")
    assert _names(torch.compile(outer, backend="eager")) == expected


def test_a_module_under_two_names_has_both() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)})
    model["b"] = model["a"]
    assert [named.names for named in Contents(model).parameters] == [("a.weight", "b.weight")]


class _Counting(nn.Module):
    """Keeps a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state_comes_back_and_scratch_buffers_are_left_out(tmp_path: Path) -> None:
    one, other = nn.Sequential(_Counting()), nn.Sequential(_Counting())
    assert set(_names(one)) | set(Contents(one).owners) == set(one.state_dict())
    one[0].calls = 5
    sw.save(tmp_path / "a", one)
    sw.load(tmp_path / "a", other)
    assert other[0].calls == 5
