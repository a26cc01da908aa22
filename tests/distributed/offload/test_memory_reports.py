"""What a memory report says is what is there: tiers, high-water marks, moments of the last step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.runtime.meter import Holding
from tests.kit.offloaded import tiers_of

WIDTH, DEPTH, SAMPLES = 32, 4, 8
ROW_BYTES = 4 * SAMPLES * WIDTH


class Stack(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.recomputes = recomputes

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def build(*, stage: int, budget: sw.Budget, recomputes: bool = False):
    torch.manual_seed(0)
    model = sw.shard(
        Stack(recomputes=recomputes),
        stage=stage,
        units=[nn.Linear] if stage == 3 else None,
        offload=sw.AdaptiveOffload(budget),
        chunk_bytes=4 * (WIDTH * WIDTH + WIDTH),
    )
    return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters()))


def train(model, optimizer, *, num_micro_batches: int = 1) -> None:
    for _ in range(num_micro_batches):
        x = torch.randn(SAMPLES, WIDTH)
        optimizer.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_moments_are_the_uses_of_chunks_in_order(stage) -> None:
    model, optimizer = build(stage=stage, budget=sw.Budget(accelerator=10**7))
    assert sw.memory_report(model).moments == ()
    for _ in range(3):
        train(model, optimizer)
        with torch.no_grad():  # no part of a step
            model(torch.randn(SAMPLES, WIDTH))
    moments = sw.memory_report(model).moments
    forward = [m.chunk for m in moments if m.segment == "forward"]
    backward = [m.chunk for m in moments if m.segment == "backward"]
    update = [m.chunk for m in moments if m.segment == "update"]
    assert len(forward) == DEPTH
    assert forward == sorted(forward) == update
    needs_no_values = backward[::-1] == forward[1:]  # the first layer's input needs no gradient
    assert backward[::-1] == forward or (stage == 3 and needs_no_values)
    segments = [moment.segment for moment in moments]
    assert segments == sorted(segments, key=["forward", "backward", "update"].index)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_accumulation_is_one_step_of_several_passes(stage) -> None:
    model, optimizer = build(stage=stage, budget=sw.Budget(accelerator=10**7))
    for _ in range(2):
        train(model, optimizer, num_micro_batches=3)
    segments = [moment.segment for moment in sw.memory_report(model).moments]
    assert segments.count("forward") == 3 * DEPTH
    assert segments.count("update") == DEPTH


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("recomputes", [False, True])
def test_activations_are_what_autograd_saves_to_the_byte(recomputes) -> None:
    """Each layer saves its input and the loss the output; what recomputes saves as much before."""
    model, optimizer = build(stage=3, budget=sw.Budget(accelerator=10**7), recomputes=recomputes)
    for _ in range(2):
        train(model, optimizer)
    held = sw.memory_report(model).moments
    forward = [m.activation_bytes for m in held if m.segment == "forward"]
    assert forward == [(layer + recomputes) * ROW_BYTES for layer in range(DEPTH)]
    backward = [m.activation_bytes for m in held if m.segment == "backward"]
    assert backward[: DEPTH - 1] == [layer * ROW_BYTES for layer in range(DEPTH, 1, -1)]
    meter = model._shardwise.meter
    meter.reset()
    loss = model(torch.randn(SAMPLES, WIDTH)).square().mean()
    assert meter.held[Holding.ACTIVATIONS] == (DEPTH + 1) * ROW_BYTES
    optimizer.backward(loss)
    assert meter.held[Holding.ACTIVATIONS] == 0


@pytest.mark.world_size(2)
def test_another_shape_is_recorded_anew() -> None:
    model, optimizer = build(stage=3, budget=sw.Budget(accelerator=10**7))
    train(model, optimizer)
    before = sw.memory_report(model).moments
    for samples in (2 * SAMPLES, SAMPLES):
        optimizer.backward(model(torch.randn(samples, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    after = sw.memory_report(model).moments
    peak = max(moment.activation_bytes for moment in after)
    assert peak == 2 * max(moment.activation_bytes for moment in before)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_tiers_are_those_of_the_ledgers(stage, tmp_path) -> None:
    budget = sw.Budget(accelerator=45_000, host=60_000, disk_path=tmp_path)
    model, optimizer = build(stage=stage, budget=budget)
    for _ in range(2):
        train(model, optimizer)
    report, tiers = sw.memory_report(model), tiers_of(model)
    assert report == sw.memory_report(optimizer)
    assert (report.host.held_bytes, report.host.peak_bytes) == (
        tiers.host.allocated_bytes,
        tiers.host.peak_bytes,
    )
    assert report.disk is not None
    assert report.disk.held_bytes == tiers.disk.allocated_bytes
    assert report.host.limit_bytes == 60_000
    assert report.disk.limit_bytes is None
    assert sum(report.accelerator_peak.values()) == report.accelerator.peak_bytes
    text = str(report)
    for word in ("accelerator", "host", "disk", "limit", "activations"):
        assert word in text
    sw.memory_report(model, reset_peaks=True)
    fresh = sw.memory_report(model)
    assert fresh.accelerator.peak_bytes == fresh.accelerator.held_bytes
    assert fresh.host.peak_bytes == fresh.host.held_bytes


@pytest.mark.world_size(2)
def test_without_budgets_a_report_says_what_is_held() -> None:
    model = sw.shard(Stack(), stage=3)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters()))
    train(model, optimizer)
    report = sw.memory_report(model)
    numel = sum(p.numel() for p in model.parameters())
    held = report.accelerator.held_bytes
    assert 4 * numel / dist.get_world_size() <= held <= 1.1 * 4 * numel / dist.get_world_size()
    assert report.accelerator.peak_bytes is None
    assert report.disk is None
    assert report.moments == ()
    with pytest.raises(sw.ConfigurationError, match=r"shardwise\.shard"):
        sw.memory_report(nn.Linear(2, 2))
