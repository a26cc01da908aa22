"""What went wrong once, or could: failing disks, frozen state, several optimizers, raw writes."""

from __future__ import annotations

import errno
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as torch_optimizer

import shardwise as sw
from shardwise.report import held_bytes
from tests.distributed.offload.test_room import limit
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters
from tests.unit.tiers.faulty import FaultyFileCalls


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def build(offload, stage=2, make=torch.optim.AdamW, **options):
    model = sw.shard(model_of(), stage=stage, offload=offload, chunk_bytes=20_000, **options)
    return model, sw.ShardedOptimizer(make(model.parameters(), lr=0.01))


def train(model, optimizer) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def on_disk(folder) -> sw.StaticOffload:
    return sw.StaticOffload(optimizer=1.0, to="disk", disk_path=folder)


class Failing:
    """Fails the calls of one kind while it is told to."""

    def __init__(self, kind: str, num_failures: int = 1) -> None:
        self.kind = kind
        self.num_left = 0
        self.num_failures = num_failures

    def start(self) -> None:
        self.num_left = self.num_failures

    def calls(self) -> FaultyFileCalls:
        def call(real, *args):
            if self.num_left:
                self.num_left -= 1
                raise OSError(errno.EIO, "no such sector")
            return getattr(real, self.kind)(*args)

        return FaultyFileCalls(**{self.kind: call})


@pytest.mark.world_size(1, 2)
def test_a_failed_read_costs_nothing(tmp_path, monkeypatch) -> None:
    """On one rank, at the first chunk: what was not read is not written back, or sent."""
    failing = Failing("read")
    limit(monkeypatch, calls=failing.calls())
    model, optimizer = build(on_disk(tmp_path))
    for _ in range(2):
        train(model, optimizer)
    before = optimizer.state_dict()["state"]
    first = dist.get_rank() == 0
    if first:
        failing.start()
        with pytest.raises(sw.ShardwiseError, match="no such sector"):
            train(model, optimizer)
        optimizer.zero_grad()
    else:
        train(model, optimizer)
    values = parameters(model)
    gathered = [values] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    for other in gathered:
        assert_bit_equal(other, values, what="over ranks")
    if dist.get_world_size() == 1:
        for index, state in optimizer.state_dict()["state"].items():
            assert_bit_equal(state, before[index], what="state")
    train(model, optimizer)
    assert all(value.isfinite().all() for value in parameters(model).values())


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_state_of_frozen_layers_is_kept(stage, to, tmp_path) -> None:
    choice = sw.StaticOffload(optimizer=1.0, to=to, disk_path=tmp_path if to == "disk" else None)

    def run(offload) -> dict[str, torch.Tensor]:
        model, optimizer = build(None, stage)
        train(model, optimizer)
        saved = optimizer.state_dict()
        torch.manual_seed(0)
        later = model_of()
        later[0].requires_grad_(False)
        sw.shard(later, stage=stage, offload=offload, chunk_bytes=20_000)
        optimizer = sw.ShardedOptimizer(torch.optim.AdamW(later.parameters(), lr=0.01))
        optimizer.load_state_dict(saved)
        train(later, optimizer)
        assert optimizer.state_dict()["state"][0]["exp_avg"].isfinite().all()
        later[0].requires_grad_(True)
        train(later, optimizer)
        return parameters(later)

    assert_bit_equal(run(choice), run(None), what="after thawing")


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("to", ["host", "disk"])
def test_optimizers_over_the_same_parameters_have_state_of_their_own(to, tmp_path) -> None:
    place = tmp_path if to == "disk" else None

    def run(offload) -> dict[str, torch.Tensor]:
        model, first = build(offload)
        second = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.001))
        for optimizer in (first, second, first, second):
            train(model, optimizer)
        return parameters(model)

    choice = sw.StaticOffload(optimizer=1.0, to=to, disk_path=place)
    assert_bit_equal(run(choice), run(None), what="two optimizers")


@pytest.mark.world_size(1)
@pytest.mark.parametrize("to", ["host", "disk"])
def test_state_goes_with_its_optimizer(to, tmp_path) -> None:
    place = tmp_path if to == "disk" else None
    model, optimizer = build(sw.StaticOffload(optimizer=1.0, to=to, disk_path=place))
    train(model, optimizer)
    with_adam = getattr(held_bytes(model, optimizer), to)
    del optimizer
    gc.collect()
    gc.collect()  # what hooks held is found unreachable by the first
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    train(model, optimizer)
    assert getattr(held_bytes(model, optimizer), to) <= with_adam * 0.4
    optimizer.state.clear()
    train(model, optimizer)


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("to", ["host", "disk"])
def test_state_that_the_user_cleared_stays_cleared(to, tmp_path) -> None:
    place = tmp_path if to == "disk" else None

    def run(offload) -> dict[str, torch.Tensor]:
        model, optimizer = build(offload)
        train(model, optimizer)
        optimizer.state.clear()
        train(model, optimizer)
        return parameters(model)

    choice = sw.StaticOffload(optimizer=1.0, to=to, disk_path=place)
    assert_bit_equal(run(choice), run(None), what="cleared")


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("to", ["host", "disk"])
def test_writes_that_autograd_does_not_see_are_kept(to, tmp_path) -> None:
    place = tmp_path if to == "disk" else None

    def run(offload) -> dict[str, torch.Tensor]:
        model, optimizer = build(offload)
        for _ in range(3):
            train(model, optimizer)
            for p in model.parameters():
                p.data.clamp_(-0.01, 0.01)
        return parameters(model)

    choice = sw.StaticOffload(optimizer=1.0, to=to, disk_path=place)
    assert_bit_equal(run(choice), run(None), what="clamped")


@pytest.mark.world_size(2)
def test_a_refused_change_of_packing_leaves_the_model_trainable(tmp_path, monkeypatch) -> None:
    """Muon needs whole matrices, which need other chunks: twice the room for a moment."""
    size = 4 * 4 * 64 * 64 // 2
    limit(monkeypatch, disk=int(size * 1.6))
    torch.manual_seed(0)
    plain = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    model = sw.shard(nn.Sequential(*plain), stage=2, offload=on_disk(tmp_path))
    reference = sw.shard(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)]), stage=2)
    reference.load_state_dict(model.state_dict())
    with pytest.raises(sw.BudgetError):
        sw.ShardedOptimizer(torch.optim.Muon(model.parameters()))
    for one in (model, reference):
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(one.parameters(), lr=0.1))
        for _ in range(3):
            train(one, optimizer)
    assert_bit_equal(parameters(model), parameters(reference), what="after the refusal")


@pytest.mark.world_size(1)
@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_dry_run_counts_what_would_rest(to, tmp_path) -> None:
    place = tmp_path if to == "disk" else None
    choice = sw.StaticOffload(optimizer=1.0, to=to, disk_path=place)
    with FakeTensorMode():
        model, optimizer = build(choice)
        for _ in range(2):
            optimizer.backward(model(torch.ones(3, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        numel = sum(p.numel() for p in model.parameters())
        held = held_bytes(model, optimizer)
    assert 12 * numel <= getattr(held, to) <= 12.5 * numel


@pytest.mark.world_size(1)
def test_the_foretelling_of_state_is_not_seen(tmp_path) -> None:
    seen: list[torch.optim.Optimizer] = []
    handle = torch_optimizer.register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(optimizer)
    )
    try:
        model, optimizer = build(on_disk(tmp_path))
        assert not seen
        train(model, optimizer)
        assert {id(one) for one in seen} == {id(optimizer), id(optimizer.unwrap())}
    finally:
        handle.remove()


@pytest.mark.world_size(1)
def test_an_optimizer_can_go_after_a_failed_step(tmp_path, monkeypatch) -> None:
    """The next chunk was being read ahead when the step failed."""
    failing = Failing("write")
    limit(monkeypatch, calls=failing.calls())
    model, optimizer = build(on_disk(tmp_path))
    train(model, optimizer)
    failing.start()
    with pytest.raises(sw.ShardwiseError, match="no such sector"):
        train(model, optimizer)
    optimizer.zero_grad()
    [engine] = optimizer._binding.engines()
    tiers = engine.offload.mover.tiers
    del optimizer
    gc.collect()
    gc.collect()  # what hooks held is found unreachable by the first
    masters = sum(4 * chunk.own.numel for chunk in engine.chunks)
    assert tiers.disk.allocated_bytes <= masters * 1.3
