"""Budgets where ranks differ, models change or a step fails: no hang, no silent crossing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.runtime.adaptation import Adaptation
from shardwise.tiers import HostTier
from tests.kit.budgets import asked_bytes
from tests.kit.offloaded import tiers_of, use_hostile_tiers
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters

WIDTH, DEPTH, SAMPLES = 64, 6, 8
CHUNK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
PLENTY = sw.Budget(accelerator=10**6)


class Forked(nn.Module):
    """Every rank leaves other layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number % 3 != dist.get_rank():
                x = layer(x)
        return x


def sequential() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


def narrow() -> nn.Module:
    """Some chunks are one atom, so that other ranks own nothing of them."""
    layers = [nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)


def build(make_model=sequential, *, stage=3, budget=None, make=torch.optim.AdamW, frozen=0, **more):
    torch.manual_seed(0)
    model = make_model()
    for layer in list(model.children())[:frozen]:
        layer.requires_grad_(False)
    options = {} if budget is None else {"offload": sw.AdaptiveOffload(budget)}
    options |= {"units": [nn.Linear]} if stage == 3 else {}
    sw.shard(model, stage=stage, chunk_bytes=CHUNK_BYTES, **options)
    return model, sw.ShardedOptimizer(make(model.parameters(), lr=1e-2), **more)


def backward(model, optimizer, *, step: int = 0, samples: int = SAMPLES) -> None:
    torch.manual_seed(100 * step + dist.get_rank())
    optimizer.backward(model(torch.randn(samples, WIDTH)).square().mean())


def train(model, optimizer, *, steps: int = 1, samples: int = SAMPLES) -> None:
    for step in range(steps):
        backward(model, optimizer, step=step, samples=samples)
        optimizer.step()
        optimizer.zero_grad()


def smallest(tier: str, run, **budget) -> int:
    """Return the least bytes of a tier with which ``run`` trains, by what refusals say."""
    size = 1
    for _ in range(5):
        try:
            run(sw.Budget(**{**budget, tier: size}))
        except sw.BudgetError as error:
            size = asked_bytes(error, tier)
        else:
            return size
    raise AssertionError("what a refusal asks for does not do")


def assert_within_budget(model) -> None:
    report = sw.memory_report(model)
    assert report.accelerator.peak_bytes <= report.accelerator.limit_bytes, report
    assert report.host.limit_bytes is None or report.host.peak_bytes <= report.host.limit_bytes


@pytest.mark.world_size(2, 3, timeout_s=15)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_use_other_parameters_do_not_wait_for_each_other_forever(stage) -> None:
    runs = []
    for budget in (None, PLENTY):
        model, optimizer = build(Forked, stage=stage, budget=budget)
        train(model, optimizer, steps=3)
        runs.append(parameters(model))
    assert_bit_equal(runs[1], runs[0], what="with budgets")


@pytest.mark.world_size(2, 3, timeout_s=15)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_without_a_pass_takes_part(stage) -> None:
    runs = []
    for budget in (None, PLENTY):
        model, optimizer = build(stage=stage, budget=budget)
        for step in range(4):
            for micro_batch in range(2):
                if dist.get_rank() != step % 3 or (micro_batch and not step):
                    backward(model, optimizer, step=10 * step + micro_batch)
            optimizer.step()
            optimizer.zero_grad()
        runs.append(parameters(model))
    assert_bit_equal(runs[1], runs[0], what="with budgets")


@pytest.mark.world_size(2, timeout_s=15)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_without_a_pass_sees_what_became_trainable(stage) -> None:
    runs = []
    for budget in (None, sw.Budget(accelerator=450_000)):
        model, optimizer = build(stage=stage, budget=budget, frozen=3)
        train(model, optimizer, steps=2)
        model.requires_grad_(True)
        if dist.get_rank() == 0:
            backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer)
        runs.append(parameters(model))
    assert_bit_equal(runs[1], runs[0], what="with budgets")


@pytest.mark.world_size(3, timeout_s=15)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("is_known", [False, True])
def test_ranks_that_own_nothing_of_a_chunk_plan_alike(stage, is_known) -> None:
    """Optimizers make state for pieces, so the state that a rank has is its own matter."""

    class Unknown(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    make = torch.optim.AdamW if is_known else Unknown
    runs = []
    for budget in (None, PLENTY):
        model, optimizer = build(
            narrow, stage=stage, budget=budget, make=make, frozen=2, atom="parameter"
        )
        train(model, optimizer, steps=2)
        model.requires_grad_(True)
        train(model, optimizer, steps=3)
        runs.append(parameters(model))
    assert_bit_equal(runs[1], runs[0], what="with budgets")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_state_of_what_becomes_trainable_is_planned_for(stage) -> None:
    """Before it exists: no tier is crossed, and refusals of host memory name what does."""

    def run(budget: sw.Budget) -> None:
        model, optimizer = build(stage=stage, budget=budget, frozen=3)
        train(model, optimizer, steps=2)
        model.requires_grad_(True)
        train(model, optimizer, steps=2)
        assert_within_budget(model)

    accelerator = smallest("accelerator", run)
    host = smallest("host", run, accelerator=accelerator)
    for more in (0, CHUNK_BYTES, 3 * CHUNK_BYTES, 6 * CHUNK_BYTES):
        run(sw.Budget(accelerator=accelerator + more, host=host))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_packs_again_leaves_room_for_others(stage) -> None:
    def run(budget: sw.Budget) -> None:
        torch.manual_seed(0)
        model = sw.shard(
            sequential(),
            stage=stage,
            units=[nn.Linear] if stage == 3 else None,
            chunk_bytes=CHUNK_BYTES,
            offload=sw.AdaptiveOffload(budget),
        )
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [*(p for p in model.parameters() if p.ndim != 2), *matrices[:3]]
        first = sw.ShardedOptimizer(torch.optim.AdamW(others, lr=1e-2))
        second = sw.ShardedOptimizer(torch.optim.Muon(matrices[3:], lr=1e-2))
        for step in range(2):
            backward(model, first, step=step)
            for optimizer in (first, second):
                optimizer.step()
            for optimizer in (first, second):
                optimizer.zero_grad()
            assert_within_budget(model)

    accelerator = smallest("accelerator", run)
    for more in (0, 2 * CHUNK_BYTES, 5 * CHUNK_BYTES, 9 * CHUNK_BYTES):
        run(sw.Budget(accelerator=accelerator + more))


@pytest.mark.world_size(2)
def test_a_batch_that_was_refused_is_forgotten_with_its_gradients() -> None:
    least = smallest("accelerator", lambda budget: train(*build(budget=budget)))
    model, optimizer = build(budget=sw.Budget(accelerator=least))
    train(model, optimizer, steps=2)
    backward(model, optimizer, samples=4 * SAMPLES)
    for _ in range(2):  # a step that is tried again is the same step
        with pytest.raises(sw.BudgetError):
            optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)


@pytest.mark.world_size(2)
def test_resetting_the_peaks_of_a_report_changes_no_plan() -> None:
    part = 6 * CHUNK_BYTES + smallest("accelerator", lambda budget: train(*build(budget=budget)))
    held = []
    for resets in (False, True):
        model, optimizer = build(budget=sw.Budget(accelerator=part))
        backward(model, optimizer)
        sw.memory_report(model, reset_peaks=resets)
        optimizer.step()
        held.append(tiers_of(model).accelerator.allocated_bytes)
    assert held[0] == held[1] > 0


@pytest.mark.world_size(1, 2)
def test_an_interrupt_between_moves_leaves_no_stale_view(monkeypatch) -> None:
    use_hostile_tiers(monkeypatch)
    model, optimizer = build(budget=PLENTY)
    backward(model, optimizer)
    real, done = Adaptation._move, []

    def interrupted(self, *arguments):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(real(self, *arguments))

    with monkeypatch.context() as patch:
        patch.setattr(Adaptation, "_move", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for chunk in model._shardwise.chunks:
        for record in chunk.records:
            piece = optimizer._binding.piece(record)
            if piece is None:
                continue
            assert piece.data_ptr() == record.piece_in(chunk.own.update_S).data_ptr()
    optimizer.step()
    expected_model, expected = build()
    backward(expected_model, expected)
    expected.step()
    assert_bit_equal(parameters(model), parameters(expected_model), what="after the interrupt")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_of_all_state_at_once_is_refused_where_host_memory_cannot_hold_it(
    stage, tmp_path
) -> None:
    def run(budget: sw.Budget, *, is_hooked: bool) -> None:
        model, optimizer = build(stage=stage, budget=budget)
        if is_hooked and dist.get_rank() == 0:
            optimizer.unwrap().register_step_post_hook(lambda *_: None)
        before = parameters(model)
        try:
            train(model, optimizer)
        except sw.BudgetError:
            optimizer.zero_grad()
            assert_bit_equal(parameters(model), before, what="after the refusal")
            raise
        train(model, optimizer, steps=2)

    def plain(budget: sw.Budget) -> None:
        run(budget, is_hooked=False)

    accelerator = smallest("accelerator", plain)
    options = {"accelerator": accelerator, "disk_path": tmp_path}
    least = smallest("host", plain, **options)
    try:
        run(sw.Budget(host=least, **options), is_hooked=True)
    except sw.BudgetError as error:
        host = asked_bytes(error, "host") if dist.get_rank() == 0 else 0
        sizes = [0] * dist.get_world_size()
        dist.all_gather_object(sizes, host)
        run(sw.Budget(host=sizes[0], **options), is_hooked=True)
    else:
        assert stage == 2, "all of it is on disk"


@pytest.mark.world_size(1, 2)
def test_a_skipped_step_is_no_part_of_the_next() -> None:
    model, optimizer = build(stage=2, budget=PLENTY)
    train(model, optimizer)
    expected = len(sw.memory_report(model).moments)
    for factor in (float("inf"), 1.0):
        optimizer.backward(model(torch.randn(SAMPLES, WIDTH)).square().mean() * factor)
        optimizer.step()
        optimizer.zero_grad()
    assert len(sw.memory_report(model).moments) == expected


@pytest.mark.world_size(2)
def test_values_that_the_user_replaces_move_nothing() -> None:
    model, optimizer = build(stage=2, budget=PLENTY)
    train(model, optimizer, steps=2)
    held = tiers_of(model).accelerator.allocated_bytes
    if dist.get_rank() == 0:
        model[0].weight.data = model[0].weight.data.clone()
    model(torch.randn(SAMPLES, WIDTH))
    assert tiers_of(model).accelerator.allocated_bytes == held > 0


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("host_in_pages", [False, True])
def test_what_a_refusal_asks_for_works_in_pages_and_sectors(
    stage, host_in_pages, tmp_path, monkeypatch
) -> None:
    """A disk hands out sectors, and page-locked memory pages."""
    if host_in_pages:
        monkeypatch.setattr(
            HostTier,
            "footprint_bytes",
            lambda self, numel, dtype: -(-numel * dtype.itemsize // 4096) * 4096,
        )

    def run(budget: sw.Budget) -> None:
        model, optimizer = build(stage=stage, budget=budget)
        train(model, optimizer, steps=2)
        assert_within_budget(model)

    accelerator = smallest("accelerator", run)
    smallest("host", run, accelerator=accelerator)
    host = smallest("host", run, accelerator=accelerator, disk_path=tmp_path)
    smallest("disk", run, accelerator=accelerator, host=host, disk_path=tmp_path)
