"""A write to disk that fails raises, and costs nothing: what was to be written is kept, and is
written another time."""

from __future__ import annotations

import errno
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.tiers import DiskOptions, DiskTier
from tests.distributed.offload.test_faults import build, on_disk, train
from tests.distributed.offload.test_room import limit
from tests.kit.offloaded import tiers_of, use_hostile_tiers
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters
from tests.unit.tiers.faulty import FaultyFileCalls

BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)


class Fault:
    """Lets some calls pass, then fails some, then lets all pass."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.num_passing, self.num_failing = 0, 0

    def start(self, num_passing: int, num_failing: int = 1) -> None:
        self.num_passing, self.num_failing = num_passing, num_failing

    def meet(self) -> None:
        """Count one call."""
        if self.num_passing:
            self.num_passing -= 1
        elif self.num_failing:
            self.num_failing -= 1
            raise type(self.error)(*self.error.args)


def break_device(monkeypatch, code: int) -> Fault:
    """Let ``write`` of the operating system fail."""
    fault = Fault(OSError(code, "injected"))

    def write(real, *arguments):
        fault.meet()
        return real.write(*arguments)

    limit(monkeypatch, calls=FaultyFileCalls(write=write))
    return fault


def break_submission(monkeypatch) -> Fault:
    """Let a copy to disk be refused when it is asked for; tiers are hostile besides."""
    from shardwise.tiers import Tiers

    fault = Fault(sw.ShardwiseError("injected"))
    real = Tiers.copy

    def copy(self, source, target):
        if target.tier is self.disk:
            fault.meet()
        return real(self, source, target)

    use_hostile_tiers(monkeypatch)
    monkeypatch.setattr(Tiers, "copy", copy)
    return fault


def values_of(model: nn.Module, optimizer: sw.ShardedOptimizer) -> list[dict[str, torch.Tensor]]:
    """Return what is known of every parameter: value, master and moments."""
    saved = optimizer.state_dict()
    masters = saved.get("shardwise", {}).get("masters", {})
    return [
        {"value": value, **saved["state"][index], "master": masters.get(index, value)}
        for index, value in enumerate(parameters(model).values())
    ]


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.world_size(1, 2, timeout_s=90)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "submission"])
@pytest.mark.parametrize("num_passing", [0, 1, 4, 10])
def test_every_parameter_is_wholly_old_or_wholly_new(
    stage, kind, num_passing, tmp_path, monkeypatch
) -> None:
    """Of four chunks of three slices: the first write, one inside of a chunk, one of the last."""
    precision = BF16 if num_passing % 2 else None
    reference = build(None, stage, mixed_precision=precision)
    is_refused = kind == "submission"
    fault = (
        break_submission(monkeypatch)
        if is_refused
        else break_device(monkeypatch, getattr(errno, kind))
    )
    model, optimizer = build(on_disk(tmp_path), stage, mixed_precision=precision)
    for _ in range(2):
        train(model, optimizer)
        train(*reference)
    old = values_of(*reference)
    train(*reference)
    new = values_of(*reference)
    is_first = dist.get_rank() == 0
    if is_first:
        fault.start(num_passing)
        with pytest.raises(sw.ShardwiseError, match="injected"):
            train(model, optimizer)
        assert fault.num_failing == 0
        optimizer.zero_grad()
    else:
        train(model, optimizer)
    found = values_of(model, optimizer)
    if dist.get_world_size() == 1:
        versions = [
            "new" if is_equal(one, updated) else "old" if is_equal(one, before) else "mixed"
            for one, before, updated in zip(found, old, new, strict=True)
        ]
        assert "mixed" not in versions, versions
        assert "new" in versions
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parameters(model))
    for other in gathered:
        assert_bit_equal(other, gathered[0], what="over ranks")
    train(model, optimizer)  # what was kept is written now
    assert all(value.isfinite().all() for value in parameters(model).values())
    assert tiers_of(model).host.allocated_bytes == 0


@pytest.mark.world_size(1)
def test_a_device_that_stays_broken_raises_at_every_step(tmp_path, monkeypatch) -> None:
    fault = break_device(monkeypatch, errno.EIO)
    model, optimizer = build(on_disk(tmp_path))
    train(model, optimizer)
    before = values_of(model, optimizer)
    fault.start(0, 10**9)
    for _ in range(5):
        with pytest.raises(sw.ShardwiseError, match="injected"):
            train(model, optimizer)
        optimizer.zero_grad()
    saved = values_of(model, optimizer)
    assert all(value.isfinite().all() for one in saved for value in one.values())
    assert not is_equal(saved[0], before[0])
    tiers = tiers_of(model)
    assert tiers.host.allocated_bytes <= tiers.disk.allocated_bytes
    del model, optimizer
    gc.collect()
    gc.collect()  # what hooks held is found unreachable by the first
    assert tiers.host.allocated_bytes == 0


@pytest.mark.world_size(1)
def test_kept_values_win_over_a_read_that_was_begun(tmp_path, monkeypatch) -> None:
    """One chunk: it is asked for again before anybody has waited for its write."""
    fault = break_device(monkeypatch, errno.EIO)
    model, optimizer = build(on_disk(tmp_path))
    train(model, optimizer)
    [own, *_] = [chunk.own for chunk in model._shardwise.chunks]
    with own.at_hand():
        own.update_S.fill_(7.0)
        fault.start(0, 10**9)
    own.prefetch()
    mover = model._shardwise.offload.mover
    with pytest.raises(sw.ShardwiseError, match="injected"):
        mover.settle()
    fault.start(0, 0)
    for is_changed in (False, True, False):
        with own.at_hand(is_changed=is_changed):
            assert own.update_S.eq(7.0).all()
        mover.settle()
    assert mover.tiers.host.allocated_bytes == 0


@pytest.mark.world_size(1)
def test_kept_values_move_to_another_tier(tmp_path, monkeypatch) -> None:
    fault = break_device(monkeypatch, errno.EIO)
    model, optimizer = build(on_disk(tmp_path))
    train(model, optimizer)
    state, mover = model._shardwise.chunks[0].own.state, model._shardwise.offload.mover
    with state.at_hand():
        state["master"].fill_(7.0)
        fault.start(0, 10**9)
    with pytest.raises(sw.ShardwiseError, match="injected"):
        mover.settle()
    state.move(mover.tiers.host)
    assert state["master"].eq(7.0).all()
    fault.start(0, 0)
    state.move(mover.tiers.disk)
    with state.at_hand(is_changed=False):
        assert state["master"].eq(7.0).all()
    assert mover.tiers.host.allocated_bytes == 0


def test_the_options_of_a_tier_are_what_the_faults_assume(tmp_path) -> None:
    """A slice of these models is one call to ``write``."""
    tier = DiskTier(DiskOptions(folder=tmp_path))
    assert DiskOptions(folder=tmp_path).piece_bytes > 4 * 65 * 64
    tier.close()
