"""What was asked for is loaded, and used by the next forward; half a step is refused or right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal

if TYPE_CHECKING:
    from pathlib import Path


def _start(value: float, stage: int) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    sw.shard(model, stage=stage)
    return model, sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    with sw.full_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_the_checkpoint_that_was_asked_for_is_loaded(
    has_optimizer: bool, strict: bool, tmp_path: Path
) -> None:
    """Not the newest one."""
    for name, value in (("earlier", 1.0), ("later", 2.0)):
        sw.save(tmp_path / name, *_start(value, 2))
    for name, value in (("earlier", 1.0), ("later", 2.0)):
        model, optimizer = _start(0.0, 3)
        sw.load(tmp_path / name, model, optimizer if has_optimizer else None, strict=strict)
        assert all((one == value).all() for one in _values(model).values())


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_next_forward_sees_what_was_loaded(stage: int, tmp_path: Path) -> None:
    source, source_optimizer = _start(1.0, stage)
    sw.save(tmp_path / "a", source, source_optimizer)
    x = torch.ones(3, 2)
    expected = source(x)
    model, optimizer = _start(2.0, stage)
    assert not torch.equal(model(x), expected)
    sw.load(tmp_path / "a", model, optimizer)
    assert torch.equal(model(x), expected)


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_load_between_forward_and_backward_is_noticed_by_autograd(
    stage: int, tmp_path: Path
) -> None:
    """As in plain torch: the values that forward has used are gone. The next step is right."""
    source, source_optimizer = _start(1.0, stage)
    sw.save(tmp_path / "a", source, source_optimizer)
    x = torch.ones(3, 2)
    model, optimizer = _start(2.0, stage)
    loss = model(x).sum()
    sw.load(tmp_path / "a", model, optimizer)
    with pytest.raises(RuntimeError):
        optimizer.backward(loss)
    optimizer.zero_grad()
    for one, its_optimizer in ((source, source_optimizer), (model, optimizer)):
        its_optimizer.backward(one(x).sum())
        its_optimizer.step()
        its_optimizer.zero_grad()
    assert_bit_equal(_values(model), _values(source))
