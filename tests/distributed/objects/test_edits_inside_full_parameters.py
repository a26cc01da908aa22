"""Edits inside `full_parameters` are kept on all ranks when asked for, and refused otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import STAGES, parameters

if TYPE_CHECKING:
    from collections.abc import Callable


def _double(parameter: nn.Parameter) -> None:
    parameter.mul_(2)


def _replace(parameter: nn.Parameter) -> None:
    parameter.data = parameter.detach() * 2


def _copy(parameter: nn.Parameter) -> None:
    parameter.copy_(parameter.detach().clone() * 2)


def _write_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(2)


_EDITS: dict[str, Callable[[nn.Parameter], None]] = {
    "mul_": _double,
    "data=": _replace,
    "copy_": _copy,
    "data.mul_": _write_data,
}


def _make(stage: int, dtype: torch.dtype) -> tuple[nn.Module, sw.ShardedOptimizer]:
    torch.manual_seed(0)
    precision = sw.MixedPrecision(param_dtype=dtype)
    model = sw.shard(nn.Linear(5, 3), stage=stage, mixed_precision=precision)
    return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def _step(model: nn.Module, optimizer: sw.ShardedOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 5)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_are_written_back(dtype: torch.dtype) -> None:
    """Right after a step, whose updates may still travel; a step at rate 0 then keeps the edit."""
    for edit in _EDITS:
        for only_rank_0 in (False, True):
            for stage in STAGES:
                model, optimizer = _make(stage, dtype)
                _step(model, optimizer)
                with sw.full_parameters(model, writeback=True), torch.no_grad():
                    expected = {name: p.detach() * 2 for name, p in model.named_parameters()}
                    if dist.get_rank() == 0 or not only_rank_0:
                        for parameter in model.parameters():
                            _EDITS[edit](parameter)
                assert_bit_equal(parameters(model), expected, what=f"stage {stage}")
                optimizer.param_groups[0]["lr"] = 0.0
                _step(model, optimizer)
                assert_bit_equal(parameters(model), expected, what=f"stage {stage}")


@pytest.mark.world_size(1, 2, timeout_s=20)
def test_edits_without_writeback_are_refused() -> None:
    """The message names the parameter; what autograd cannot see (`data.mul_`) cannot be noticed."""
    for edit in ("mul_", "data=", "copy_"):
        for stage in STAGES:
            model, _ = _make(stage, torch.float32)
            with (
                pytest.raises(sw.ShardwiseError, match=r"weight.*writeback=True"),
                sw.full_parameters(model),
                torch.no_grad(),
            ):
                _EDITS[edit](model.weight)
