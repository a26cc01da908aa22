"""Names and shapes are compared on all ranks before anything is changed on any."""

from __future__ import annotations

import tempfile
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
            self.head = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        return hidden if self.head is None else self.head(hidden)


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


_AWAY = {
    "host": sw.StaticOffload(optimizer=1.0),
    "disk": sw.StaticOffload(optimizer=1.0, to="disk", disk_path=tempfile.gettempdir()),
}


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("tier", _AWAY)
@pytest.mark.parametrize("chunk_bytes", [64, None])
def test_state_that_a_checkpoint_does_not_know_stays_where_it_rests(
    chunk_bytes: int | None, tier: str, tmp_path: Path
) -> None:
    """Also where a chunk holds parameters of both kinds."""
    shard = {"offload": _AWAY[tier]} | ({"chunk_bytes": chunk_bytes} if chunk_bytes else {})
    few = Job(stage=3, build=lambda: _More(has_less=True), make_optimizer=_sgd)
    more = Job(stage=3, build=_More, make_optimizer=_sgd, shard=shard)
    saved, saved_optimizer = _start(few, 1)
    _step(saved, saved_optimizer)
    sw.save(tmp_path / "checkpoint", saved, saved_optimizer)
    model, optimizer = _start(more, 2)
    _step(model, optimizer)
    before, source = whole_state(model, optimizer), whole_state(saved, saved_optimizer)
    sw.load(tmp_path / "checkpoint", model, optimizer, strict=False)
    after = whole_state(model, optimizer)
    for index, name in enumerate(before["parameters"]):
        origin = source if name in source["parameters"] else before
        position = list(origin["parameters"]).index(name)
        assert torch.equal(after["parameters"][name], origin["parameters"][name])
        loaded = after["optimizer"]["state"][index]["momentum_buffer"]
        assert torch.equal(loaded, origin["optimizer"]["state"][position]["momentum_buffer"])
        assert loaded.any()


def _step(model: nn.Module, optimizer: Any) -> None:
    optimizer.backward(model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.world_size(2, 3, timeout_s=30)
@pytest.mark.parametrize("what", ["async_", "optimizer", "kind"])
def test_arguments_that_differ_between_ranks_are_refused_on_all(what: str, tmp_path: Path) -> None:
    model, optimizer = _start(Job(stage=2), 1)
    sw.save(tmp_path / "checkpoint", model, optimizer)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    options: dict[str, Any] = {"optimizer": optimizer}
    if is_last:
        options |= {
            "async_": {"async_": True},
            "optimizer": {"optimizer": None},
            "kind": {"optimizer": 3},
        }[what]
    with pytest.raises(sw.CheckpointError, match=r"same arguments|pass one"):
        sw.save(tmp_path / "other", model, **options)
    options.pop("async_", None)
    if what != "async_":
        with pytest.raises(sw.CheckpointError, match=r"same arguments|pass one"):
            sw.load(tmp_path / "checkpoint", model, **options)
        with pytest.raises(sw.CheckpointError, match=r"same arguments|pass one"):
            sw.load(tmp_path / "checkpoint", model, **options, strict=False)
    sw.load(tmp_path / "checkpoint", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
