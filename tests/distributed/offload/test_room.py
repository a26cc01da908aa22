"""Where a tier is full, all ranks raise before anything changes, and training goes on."""

from __future__ import annotations

import errno

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.runtime import offload as runtime_offload
from shardwise.tiers import Copier, DiskTier, HostTier, Tiers, WorkerScheduler
from shardwise.tiers.memory import AcceleratorTier
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters
from tests.unit.tiers.faulty import FaultyFileCalls


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])


def limit(monkeypatch, *, host: int | None = None, disk: int | None = None, calls=None) -> None:
    """Let tiers that are opened from now on hold so many bytes."""

    def open_tiers(device, **options):
        options = options.get("disk")
        file = options and DiskTier(options, budget_bytes=disk, calls=calls)
        return Tiers(
            AcceleratorTier(device),
            HostTier(budget_bytes=host),
            file,
            copier=Copier(WorkerScheduler()),
        )

    monkeypatch.setattr(runtime_offload, "open_tiers", open_tiers)


def train(model, optimizer) -> None:
    optimizer.backward(model(torch.ones(2, 128)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("to", ["host", "disk"])
def test_no_room_for_masters_is_refused_by_shard(to, tmp_path, monkeypatch) -> None:
    first = dist.get_rank() == 0
    limit(monkeypatch, **{to: 100_000 if first else None})
    choice = sw.StaticOffload(optimizer=1.0, to=to, disk_path=tmp_path if to == "disk" else None)
    bf16 = sw.MixedPrecision(param_dtype=torch.bfloat16)
    model = model_of()
    expected = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(sw.BudgetError, match=to if first else "a rank without"):
            sw.shard(model, stage=2, mixed_precision=bf16, offload=choice, chunk_bytes=20_000)
        assert_bit_equal(dict(model.named_parameters()), expected, what="after the refusal")
    sw.shard(model, stage=2, mixed_precision=bf16)
    train(model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters())))


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("to", ["host", "disk"])
@pytest.mark.parametrize("is_module", [True, False])
def test_no_room_for_state_is_refused_before_the_first_step(
    to, is_module, tmp_path, monkeypatch
) -> None:
    """Masters fit, Adam's two moments do not; SGD, which needs less, works on the same model."""
    size = 4 * sum(p.numel() for p in model_of().parameters()) // dist.get_world_size()
    first = dist.get_rank() == 0
    limit(monkeypatch, **{to: int(2.7 * size) if first else None})
    choice = sw.StaticOffload(optimizer=1.0, to=to, disk_path=tmp_path if to == "disk" else None)
    model = model_of()
    expected = {name: p.clone() for name, p in model.named_parameters()}
    sharding = {"stage": 2, "offload": choice, "chunk_bytes": 20_000}
    if is_module:
        sw.shard(model, **sharding)
        sharding = {}
    adam, sgd = (
        torch.optim.AdamW(model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * (to == "disk")),
    )
    for _ in range(2):
        with pytest.raises(sw.BudgetError, match=to if first else "a rank without"):
            sw.ShardedOptimizer(adam, **sharding)
        if is_module:
            assert_bit_equal(parameters(model), expected, what="after the refusal")
    optimizer = sw.ShardedOptimizer(sgd, **sharding)
    for _ in range(2):
        train(model, optimizer)


@pytest.mark.world_size(2)
def test_a_failed_write_is_raised_by_the_step_and_named(tmp_path, monkeypatch) -> None:
    state = {"is_broken": False}

    def write(real, descriptor, view, offset):
        if state["is_broken"]:
            raise OSError(errno.EIO, "no such sector")
        return real.write(descriptor, view, offset)

    limit(monkeypatch, calls=FaultyFileCalls(write=write))
    choice = sw.StaticOffload(optimizer=1.0, to="disk", disk_path=tmp_path)
    model = sw.shard(model_of(), stage=2, offload=choice, chunk_bytes=20_000)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters()))
    train(model, optimizer)
    state["is_broken"] = True
    with pytest.raises(sw.ShardwiseError, match="no such sector"):
        train(model, optimizer)


@pytest.mark.world_size(2)
def test_a_folder_that_one_rank_lacks_is_named_there(tmp_path) -> None:
    first = dist.get_rank() == 0
    folder = tmp_path if first else tmp_path / "missing"
    model = model_of()
    match = "a rank without" if first else "missing"
    with pytest.raises(sw.ConfigurationError, match=match):
        sw.shard(model, offload=sw.StaticOffload(optimizer=1.0, to="disk", disk_path=folder))
    train(sw.shard(model), sw.ShardedOptimizer(torch.optim.AdamW(model.parameters())))
    assert list(tmp_path.iterdir()) == []
