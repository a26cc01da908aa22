"""Slices on disk are read before their gather asks for them, and nothing of that is left."""

from __future__ import annotations

import errno

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.runtime.own_slices import OwnSlices
from tests.distributed.offload.test_room import limit
from tests.kit.offloaded import tiers_of, use_hostile_tiers
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters
from tests.unit.tiers.faulty import FaultyFileCalls


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])


def build(folder, **options):
    choice = None
    if folder is not None:
        choice = sw.StaticOffload(optimizer=1.0, parameters=1.0, to="disk", disk_path=folder)
    model = sw.shard(model_of(), stage=3, offload=choice, **options)
    return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def train(model, optimizer) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def count_reads(monkeypatch) -> list[bool]:
    """Return a list of whether each slice that a gather asked for was on its way already."""
    found: list[bool] = []
    real = OwnSlices.fill_own

    def fill_own(self, place_S):
        if self.working is not None:  # not the reference
            found.append(any(entry.near is not None for entry in self.working._slices.values()))
        return real(self, place_S)

    monkeypatch.setattr(OwnSlices, "fill_own", fill_own)
    return found


@pytest.mark.world_size(1, 2)
def test_most_gathers_find_their_slice_on_its_way(tmp_path, monkeypatch) -> None:
    use_hostile_tiers(monkeypatch)
    model, optimizer = build(tmp_path)
    reference = build(None)
    for _ in range(2):  # the first pass records the order
        train(model, optimizer)
        train(*reference)
    found = count_reads(monkeypatch)
    train(model, optimizer)
    train(*reference)
    assert len(found) >= 6
    assert sum(found) >= len(found) // 2, found
    assert_bit_equal(parameters(model), parameters(reference[0]), what="read ahead")
    assert tiers_of(model).host.allocated_bytes == 0


@pytest.mark.world_size(1, 2)
def test_what_was_read_for_nothing_goes_at_the_end_of_a_pass(tmp_path, monkeypatch) -> None:
    model, optimizer = build(tmp_path)
    for _ in range(2):
        train(model, optimizer)
    for with_grad in (False, True):
        with torch.set_grad_enabled(with_grad):
            loss = model(torch.ones(3, 64)).square().mean()
        if with_grad:
            optimizer.backward(loss)
            optimizer.zero_grad()
        assert tiers_of(model).host.allocated_bytes == 0
    with torch.no_grad():
        model[0](torch.ones(3, 64))  # the recorded order goes on, the call does not
    assert tiers_of(model).host.allocated_bytes == 0


@pytest.mark.world_size(1)
def test_a_failed_read_ahead_raises_where_values_are_needed(tmp_path, monkeypatch) -> None:
    num_left = 0

    def read(real, *arguments):
        nonlocal num_left
        if num_left:
            num_left -= 1
            raise OSError(errno.EIO, "injected")
        return real.read(*arguments)

    limit(monkeypatch, calls=FaultyFileCalls(read=read))
    model, optimizer = build(tmp_path)
    for _ in range(2):
        train(model, optimizer)
    before = parameters(model)
    num_left = 1
    with pytest.raises(sw.ShardwiseError, match="injected"):
        model(torch.ones(3, 64))
    optimizer.zero_grad()
    assert_bit_equal(parameters(model), before, what="after the error")
    train(model, optimizer)
    assert tiers_of(model).host.allocated_bytes == 0
