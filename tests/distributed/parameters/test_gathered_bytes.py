"""Bytes at stage 3: between steps the closed form, inside a step a few chunks more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.report import held_bytes
from shardwise.runtime.meter import Holding
from tests.kit.models import TinyGPT, TinyGPTConfig

CONFIG = TinyGPTConfig(width=128, num_blocks=5, vocabulary=256, length=16, is_tied=False)


def build(precision: sw.MixedPrecision | None = None, **options):
    torch.manual_seed(0)
    model = sw.shard(TinyGPT(CONFIG), mixed_precision=precision, **options)
    return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))


def gatherer_of(optimizer):
    [engine] = optimizer._binding.engines()
    return engine.residence.gatherer


def train(model, optimizer) -> None:
    optimizer.backward(model(torch.randint(256, (1, 16))).float().logsumexp(-1).mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize(
    ("precision", "working", "state"),
    [(None, 4, 8), (sw.MixedPrecision(param_dtype=torch.bfloat16), 2, 12)],
    ids=["fp32", "bf16"],
)
def test_bytes_between_steps_are_the_closed_form(precision, working, state) -> None:
    size = dist.get_world_size()
    model, optimizer = build(precision)
    numel = sum(p.numel() for p in model.parameters())
    train(model, optimizer)
    held = held_bytes(model, optimizer)
    assert held.gradients == 0
    assert numel * working / size * 0.99 <= held.parameters <= 1.02 * numel * working / size
    assert held.optimizer_state <= 1.02 * numel * state / size + 8 * 100
    with torch.no_grad():
        model(torch.randint(256, (1, 16)))
    assert held_bytes(model, optimizer).parameters == held.parameters


@pytest.mark.world_size(2, 3)
def test_gathered_chunks_stay_below_two_and_the_prefetch() -> None:
    for options in ({}, {"chunk_bytes": 2**16}):
        model, optimizer = build(**options)
        gatherer = gatherer_of(optimizer)
        for _ in range(3):
            train(model, optimizer)
            with torch.no_grad():
                model(torch.randint(256, (1, 16)))
        units = sorted(_bytes_by_unit(optimizer))
        assert gatherer.limit_bytes == units[-1] + units[-2] + gatherer.prefetch_bytes
        assert gatherer.prefetch_bytes == units[-1]
        assert 0 < gatherer.peak_bytes <= gatherer.limit_bytes
        assert gatherer.gathered_bytes == 0


def _bytes_by_unit(optimizer) -> list[int]:
    """Blocks, and what lies before and after them."""
    [engine] = optimizer._binding.engines()
    by_unit: dict[str, int] = {}
    after = False
    for chunk in engine.chunks:
        name = chunk.records[0].name
        after = after or name.startswith("blocks")
        unit = name.split(".")[1] if name.startswith("blocks") else str(after)
        by_unit[unit] = by_unit.get(unit, 0) + chunk.whole_bytes
    return list(by_unit.values())


@pytest.mark.world_size(2)
def test_a_byte_limit_bounds_what_is_kept_and_saves_gathers() -> None:
    gathers = {}
    whole = None
    for keep in (True, 300_000, False):
        model, optimizer = build(reshard_after_forward=keep)
        gatherer = gatherer_of(optimizer)
        [engine] = optimizer._binding.engines()
        whole = sum(chunk.whole_bytes for chunk in engine.chunks)
        train(model, optimizer)
        before = gatherer.num_gathers
        train(model, optimizer)
        gathers[keep] = gatherer.num_gathers - before
        if keep is not True and keep is not False:
            assert gatherer.peak_bytes <= max(keep, gatherer.limit_bytes) < whole
    num_chunks = len(engine.chunks)
    assert gathers[False] == num_chunks
    assert num_chunks < gathers[True] <= 2 * num_chunks
    assert gathers[False] <= gathers[300_000] <= gathers[True]


@pytest.mark.world_size(2)
def test_gathers_are_started_ahead_once_the_order_is_known() -> None:
    """From the second step on, the chunk of the next block is on its way while one runs."""
    model, optimizer = build()
    ahead: list[bool] = []

    def look(module, args):
        number = list(model.blocks).index(module)
        if number + 1 < len(model.blocks):
            following = model.blocks[number + 1].qkv.weight._shardwise.chunk
            ahead.append(following.presence.name in ("GATHERING", "GATHERED"))

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    train(model, optimizer)
    assert not any(ahead)
    ahead.clear()
    train(model, optimizer)
    assert len(ahead) == len(model.blocks) - 1
    assert all(ahead)


@pytest.mark.world_size(2, 3)
def test_the_first_pass_keeps_no_more_than_the_others() -> None:
    """Whoever holds parameters since they were sharded, as an optimizer does, holds no values."""
    model, optimizer = build(offload=sw.AdaptiveOffload(sw.Budget()))
    held = [*model.parameters()]
    [engine] = optimizer._binding.engines()
    taken = []
    for _ in range(3):
        engine.meter.reset()
        loss = model(torch.randint(256, (1, 16))).float().logsumexp(-1).mean()
        now = engine.meter.held
        taken.append(now[Holding.GATHERED] + now[Holding.BUFFERS])
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < taken[0] <= engine.residence.gatherer.rest_bytes
    assert taken[0] <= 1.1 * taken[-1]
    del held
