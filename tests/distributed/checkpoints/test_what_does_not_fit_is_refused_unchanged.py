"""Names and shapes are compared on all ranks before anything is changed on any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.checkpoints import Job, draw_loss, exact_values, train, whole_state
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import assert_same_state

if TYPE_CHECKING:
    from pathlib import Path


class _More(nn.Module):
    def __init__(self, *, width: int = 3, has_more: bool = False, has_less: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, width)
        if has_more:
            self.more = nn.Linear(2, 2)
        if has_less:
            del self.head


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _job(**options: Any) -> Job:
    return Job(stage=3, build=lambda: _More(**options), make_optimizer=_sgd)


def _start(job: Job, seed: int) -> tuple[nn.Module, Any]:
    started = job.start(seed=seed)
    assert started is not None
    return started


_WRONG = {
    "missing": ({"has_more": True}, "missing .*'more.bias'"),
    "unexpected": ({"has_less": True}, "unexpected .*'head.bias'"),
    "shape": ({"width": 2}, r"'head.weight' of shape \(3, 5\) for \(2, 5\)"),
}


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("kind", _WRONG)
def test_other_names_and_shapes_are_refused_and_nothing_is_changed(
    kind: str, tmp_path: Path
) -> None:
    options, message = _WRONG[kind]
    sw.save(tmp_path / "checkpoint", *_start(_job(), 1))
    model, optimizer = _start(_job(**options), 2)
    before = whole_state(model, optimizer)
    with pytest.raises(sw.CheckpointError, match=message):
        sw.load(tmp_path / "checkpoint", model, optimizer)
    after = whole_state(model, optimizer)
    assert_bit_equal(after["parameters"], before["parameters"])
    assert_same_state(after["optimizer"], before["optimizer"])


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("kind", ["missing", "unexpected"])
def test_without_strict_what_matches_is_loaded(kind: str, tmp_path: Path) -> None:
    saved, saved_optimizer = _start(_job(), 1)
    expected = exact_values(saved, saved_optimizer)
    sw.save(tmp_path / "checkpoint", saved, saved_optimizer)
    model, optimizer = _start(_job(**_WRONG[kind][0]), 2)
    before = exact_values(model, optimizer)
    sw.load(tmp_path / "checkpoint", model, optimizer, strict=False)
    after = exact_values(model, optimizer)
    wanted = {name: expected.get(name, value) for name, value in before.items()}
    assert_bit_equal(after, wanted)


@pytest.mark.world_size(2, timeout_s=20)
def test_a_difference_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    model, optimizer = _start(Job(stage=2), 1)
    sw.save(tmp_path / "checkpoint", model, optimizer)
    if dist.get_rank() == 1:
        model.register_buffer("own", torch.zeros(1))
    with pytest.raises(sw.CheckpointError, match="'own'"):
        sw.load(tmp_path / "checkpoint", model, optimizer)


@pytest.mark.world_size(2, timeout_s=20)
def test_a_checkpoint_without_optimizer_is_not_taken_for_one(tmp_path: Path) -> None:
    model, optimizer = _start(Job(stage=2), 1)
    sw.save(tmp_path / "checkpoint", model)
    with pytest.raises(sw.CheckpointError, match="missing 'the optimizer'"):
        sw.load(tmp_path / "checkpoint", model, optimizer)
    before = optimizer.state_dict()
    sw.load(tmp_path / "checkpoint", model, optimizer, strict=False)
    assert_same_state(optimizer.state_dict(), before)


@pytest.mark.world_size(1, 2, timeout_s=20)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_wait_for_a_step_are_not_lost(stage: int, tmp_path: Path) -> None:
    model, optimizer = _start(Job(stage=stage), 1)
    sw.save(tmp_path / "checkpoint", model, optimizer)
    for is_local in (False, True):
        if is_local:
            with optimizer.no_sync():
                optimizer.backward(draw_loss(model))
        else:
            optimizer.backward(draw_loss(model))
        for call in (sw.save, sw.load):
            with pytest.raises(sw.CheckpointError, match="a gradient that waits for a step"):
                call(tmp_path / "checkpoint", model, optimizer)
        optimizer.step()
        sw.save(tmp_path / "checkpoint", model, optimizer)  # used up, though not cleared
        optimizer.zero_grad()
    sw.load(tmp_path / "checkpoint", model, optimizer)
    train(model, optimizer, 1)


@pytest.mark.world_size(2, timeout_s=20)
def test_what_belongs_to_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = _start(Job(stage=2), 1)
    other, _ = _start(Job(stage=2), 1)
    with pytest.raises(sw.CheckpointError, match="parameters of the model"):
        sw.save(tmp_path / "checkpoint", other, optimizer)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(sw.CheckpointError, match="wrap it in"):
        sw.save(tmp_path / "checkpoint", model, plain)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.world_size(2, timeout_s=20)
def test_what_only_unpickling_could_read_back_is_not_saved(tmp_path: Path) -> None:
    model, optimizer = _start(Job(stage=2), 1)
    with pytest.raises(sw.CheckpointError, match=r"'shardwise\.extra'"):
        sw.save(tmp_path / "checkpoint", model, optimizer, extra={"job": Job()})
    assert list(tmp_path.iterdir()) == []
