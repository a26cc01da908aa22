"""Budgets are used as far as they go, agreed on, and refused where they cannot work."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.budgets import asked_bytes
from tests.kit.offloaded import tiers_of
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters

if TYPE_CHECKING:
    from collections.abc import Generator

WIDTH, DEPTH, SAMPLES = 64, 6, 8
CHUNK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


def build(*, stage: int = 3, budget: sw.Budget | None = None, make=torch.optim.AdamW):
    options = {} if budget is None else {"offload": sw.AdaptiveOffload(budget)}
    units = [nn.Linear] if stage == 3 else None
    model = sw.shard(model_of(), stage=stage, units=units, chunk_bytes=CHUNK_BYTES, **options)
    return model, sw.ShardedOptimizer(make(model.parameters(), lr=1e-2))


def train(model, optimizer, *, samples: int = SAMPLES, steps: int = 1) -> None:
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.backward(model(torch.randn(samples, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def smallest(**options) -> int:
    """Return the least accelerator budget that one step can be trained in."""
    size = 1
    for _ in range(4):
        try:
            train(*build(budget=sw.Budget(accelerator=size), **options))
        except sw.BudgetError as error:
            size = asked_bytes(error, "accelerator")
        else:
            return size
    raise AssertionError("what a refusal asks for does not do")


@pytest.mark.world_size(1, 2, 3)
def test_the_smallest_budget_is_the_closed_form_and_two_chunks() -> None:
    """Two gathered chunks, the gradients of one with a slice from each peer, and activations."""
    num_ranks = dist.get_world_size()
    activation_bytes = 4 * SAMPLES * WIDTH * (DEPTH + 1)
    peers = (num_ranks - 1) / num_ranks
    closed_form = activation_bytes + (2 + 1 + peers) * CHUNK_BYTES
    assert closed_form <= smallest() <= closed_form + 2 * CHUNK_BYTES


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("stage", [2, 3])
def test_one_byte_less_is_refused_before_the_first_update(stage) -> None:
    least = smallest(stage=stage)
    model, optimizer = build(stage=stage, budget=sw.Budget(accelerator=least - 1))
    with pytest.raises(sw.BudgetError, match=f"raise Budget.accelerator to {least} bytes"):
        train(model, optimizer)
    expected = {name: p.detach().clone() for name, p in model_of().named_parameters()}
    assert_bit_equal(parameters(model), expected, what="after the refusal")
    train(*build(stage=stage, budget=sw.Budget(accelerator=least)), steps=3)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(("stage", "on_host"), [(2, 12), (3, 12)])
def test_host_holds_the_closed_form(stage, on_host) -> None:
    """Between steps; while gradients are there, one slice of each more."""
    model, optimizer = build(stage=stage, budget=sw.Budget(accelerator=smallest(stage=stage)))
    train(model, optimizer, steps=2)
    numel = sum(p.numel() for p in model.parameters())
    host = tiers_of(model).host
    expected = on_host * numel / dist.get_world_size()
    assert expected <= host.allocated_bytes <= 1.03 * expected
    staging = 2 * 16 * CHUNK_BYTES // 4
    assert host.peak_bytes <= 1.03 * (expected + 4 * numel / dist.get_world_size()) + staging


@pytest.mark.world_size(2)
def test_more_budget_keeps_more_on_the_accelerator() -> None:
    least, held = smallest(), []
    for chunks in (0, 4, 8, 40):
        model, optimizer = build(budget=sw.Budget(accelerator=least + chunks * CHUNK_BYTES))
        train(model, optimizer, steps=2)
        held.append(tiers_of(model).accelerator.allocated_bytes)
    assert held[0] == 0
    assert held == sorted(held)
    assert held[1] > 0
    assert tiers_of(model).host.allocated_bytes == 0


@pytest.mark.world_size(2)
def test_room_to_spare_keeps_chunks_from_forward_to_backward() -> None:
    """What is left beside all slices saves gathers, one a chunk and step at last."""
    num_gathers = []
    for chunks in (0, 80):
        budget = sw.Budget(accelerator=smallest() + chunks * CHUNK_BYTES)
        model, optimizer = build(budget=budget)
        train(model, optimizer, steps=2)
        gatherer = model._shardwise.residence.gatherer
        before = gatherer.num_gathers
        train(model, optimizer)
        num_gathers.append(gatherer.num_gathers - before)
    assert num_gathers[0] > DEPTH
    assert num_gathers[1] == DEPTH


@pytest.mark.world_size(2, 3)
def test_ranks_keep_the_least_of_their_budgets() -> None:
    """What ranks may hold differs; where slices lie must not."""
    part = smallest() + 6 * CHUNK_BYTES
    expected_model, expected = build()
    train(expected_model, expected, steps=4)
    budget = sw.Budget(accelerator=10 * part if dist.get_rank() else part)
    model, optimizer = build(budget=budget)
    train(model, optimizer, steps=4)
    report = sw.memory_report(model)
    assert report.accelerator.limit_bytes == part
    assert report.homes["host"] > 0
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, dict(report.homes))
    assert sizes == [sizes[0]] * len(sizes)
    assert_bit_equal(parameters(model), parameters(expected_model), what="with budgets")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_larger_batch_makes_slices_give_way(stage) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("shardwise").addHandler(handler)
    expected_model, expected = build(stage=stage)
    budget = sw.Budget(accelerator=smallest(stage=stage) + 6 * CHUNK_BYTES)
    model, optimizer = build(stage=stage, budget=budget)
    held = []
    for samples in (SAMPLES, 6 * SAMPLES, 6 * SAMPLES, SAMPLES, 6 * SAMPLES):
        sw.memory_report(model, reset_peaks=True)
        train(model, optimizer, samples=samples, steps=2)
        train(expected_model, expected, samples=samples, steps=2)
        held.append(tiers_of(model).accelerator.allocated_bytes)
    assert held[0] > held[1] == held[2] == held[3] == held[4]
    assert sum("more of the accelerator" in message for message in messages) == 1, messages
    logging.getLogger("shardwise").removeHandler(handler)
    report = sw.memory_report(model)
    assert report.accelerator.peak_bytes <= report.accelerator.limit_bytes
    assert_bit_equal(parameters(model), parameters(expected_model), what="with budgets")


@pytest.mark.world_size(2)
def test_a_batch_that_fits_nowhere_is_refused_and_changes_nothing() -> None:
    model, optimizer = build(budget=sw.Budget(accelerator=smallest()))
    train(model, optimizer, steps=2)
    before = parameters(model)
    with pytest.raises(sw.BudgetError, match=r"raise Budget.accelerator to \d+ bytes"):
        train(model, optimizer, samples=4 * SAMPLES)
    assert_bit_equal(parameters(model), before, what="after the refusal")
    optimizer.zero_grad()
    train(model, optimizer, steps=2)  # without that batch


@pytest.mark.world_size(2)
def test_a_pass_whose_gradients_are_dropped_is_no_need() -> None:
    model, optimizer = build(budget=sw.Budget(accelerator=smallest()))
    train(model, optimizer)
    optimizer.backward(model(torch.randn(4 * SAMPLES, WIDTH)).square().mean())
    optimizer.zero_grad()
    train(model, optimizer, steps=2)


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
def test_with_a_disk_host_memory_for_copies_and_gradients_does(stage, tmp_path) -> None:
    """What a refusal asks for is no more than that, and works for the call that was refused."""
    budget = {"accelerator": smallest(stage=stage), "disk_path": tmp_path}
    asked = []
    host = 1
    for _ in range(5):
        try:
            model, optimizer = build(stage=stage, budget=sw.Budget(host=host, **budget))
            train(model, optimizer, steps=2)
            break
        except sw.BudgetError as error:
            host = asked_bytes(error, "host")
            asked.append(host)
    slice_bytes = CHUNK_BYTES // dist.get_world_size()
    gradients = DEPTH * slice_bytes
    assert asked == sorted(asked)
    assert host <= gradients + 4 * 3 * slice_bytes + 2 * slice_bytes
    assert sw.memory_report(model).host.peak_bytes <= host


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_state_is_planned_for_when_the_optimizer_is_wrapped(stage) -> None:
    """Host memory that is enough for SGD is refused to Adam, before the first update."""
    numel = sum(p.numel() for p in model_of().parameters()) // 2
    host = 4 * 2 * numel + 4 * CHUNK_BYTES  # a copy or the parameters, gradients, a few more
    budget = sw.Budget(accelerator=smallest(stage=stage), host=host)
    with pytest.raises(sw.BudgetError, match=r"raise Budget.host to \d+ bytes"):
        train(*build(stage=stage, budget=budget))
    model, optimizer = build(stage=stage, budget=budget, make=torch.optim.SGD)
    train(model, optimizer, steps=3)
    report = sw.memory_report(model)
    assert report.host.peak_bytes <= host


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_become_trainable_are_planned_for(stage, tmp_path) -> None:
    runs = []
    for budget in (None, sw.Budget(accelerator=400_000), sw.Budget(accelerator=250_000)):
        torch.manual_seed(0)
        model = model_of()
        model[:3].requires_grad_(False)
        options = {} if budget is None else {"offload": sw.AdaptiveOffload(budget)}
        units = [nn.Linear] if stage == 3 else None
        sw.shard(model, stage=stage, units=units, chunk_bytes=CHUNK_BYTES, **options)
        optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        train(model, optimizer, steps=2)
        model.requires_grad_(True)
        train(model, optimizer, steps=3)
        if budget is not None:
            report = sw.memory_report(model)
            assert report.accelerator.peak_bytes <= report.accelerator.limit_bytes
        runs.append(parameters(model))
    for run in runs[1:]:
        assert_bit_equal(run, runs[0], what="with budgets")


@pytest.mark.world_size(1, 2)
def test_a_share_of_an_accelerator_that_there_is_not_is_refused() -> None:
    model = model_of()
    with pytest.raises(sw.ConfigurationError, match="capacity of the device is not known"):
        sw.shard(model, offload=sw.AdaptiveOffload(sw.Budget(accelerator="80%")))
    train(sw.shard(model), sw.ShardedOptimizer(torch.optim.AdamW(model.parameters())))


@pytest.mark.world_size(2)
def test_shares_of_host_and_disk_are_of_what_the_node_has(tmp_path) -> None:
    budget = sw.Budget(accelerator=10**6, host="50%", disk="10%", disk_path=tmp_path)
    model, optimizer = build(budget=budget)
    train(model, optimizer)
    report = sw.memory_report(model)
    assert report.disk is not None
    for use in (report.host, report.disk):
        assert use.limit_bytes is not None
        assert 10**7 < use.limit_bytes < 10**14


@pytest.mark.world_size(2)
@pytest.mark.parametrize("keep", [False, 4 * CHUNK_BYTES])
def test_chunks_that_the_user_keeps_gathered_are_counted(keep) -> None:
    def build_kept(accelerator: int):
        model = sw.shard(
            model_of(),
            stage=3,
            units=[nn.Linear],
            reshard_after_forward=keep,
            chunk_bytes=CHUNK_BYTES,
            offload=sw.AdaptiveOffload(sw.Budget(accelerator=accelerator)),
        )
        return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters()))

    size = 1
    for _ in range(4):
        try:
            model, optimizer = build_kept(size)
            train(model, optimizer, steps=3)
        except sw.BudgetError as error:
            size = asked_bytes(error, "accelerator")
    kept_bytes = min(4, DEPTH) * CHUNK_BYTES if keep else DEPTH * CHUNK_BYTES
    assert size > smallest() + kept_bytes - 2.1 * CHUNK_BYTES
    report = sw.memory_report(model)
    assert report.accelerator.peak_bytes <= size


@pytest.mark.world_size(2)
def test_whole_parameters_are_refused_where_they_do_not_fit() -> None:
    model, optimizer = build(budget=sw.Budget(accelerator=smallest()))
    train(model, optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(sw.BudgetError, match="full_parameters") as refusal, whole(model):
        pass
    for name, layer in model.named_children():  # layer by layer there is room
        with whole(model, layer):
            own = {f"{name}.{key}": value.clone() for key, value in layer.named_parameters()}
        assert_bit_equal(own, {key: expected[key] for key in own})
    size = asked_bytes(refusal.value, "accelerator")
    model, optimizer = build(budget=sw.Budget(accelerator=size))
    train(model, optimizer)
    with whole(model):
        pass


class WithMask(nn.Module):
    """Holds more than what is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model_of()
        self.register_buffer("mask", torch.zeros(40_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.mask[0]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("is_amid_pass", [False, True])
def test_whole_parameters_need_room_beside_all_that_is_held(is_amid_pass) -> None:
    size = smallest() + 4 * 40_000
    for _ in range(3):
        budget = sw.AdaptiveOffload(sw.Budget(accelerator=size))
        model = sw.shard(WithMask(), units=[nn.Linear], chunk_bytes=CHUNK_BYTES, offload=budget)
        train(model, sw.ShardedOptimizer(torch.optim.SGD(model.parameters())))
        output = model(torch.randn(2 * SAMPLES, WIDTH)) if is_amid_pass else None
        try:
            with whole(model):
                pass
        except sw.BudgetError as error:
            size = asked_bytes(error, "accelerator")
        else:
            return
        del output
    raise AssertionError("what a refusal asks for does not do")


@contextmanager
def whole(root: nn.Module, part: nn.Module | None = None) -> Generator[None]:
    """Take whole parameters, and keep the limit meanwhile."""
    with sw.full_parameters(root if part is None else part):
        yield
    accelerator = sw.memory_report(root).accelerator
    assert accelerator.limit_bytes is not None
    assert 0 < accelerator.peak_bytes <= accelerator.limit_bytes
