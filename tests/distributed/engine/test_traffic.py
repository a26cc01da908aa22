"""What a step sends: counted at the calls of torch.distributed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from tests.kit.models import TinyGPT, TinyGPTConfig

SCALARS = 32
"""Numbers that agreements and the norm may send in a step, whatever the model."""


class Counter:
    """Elements that this rank sends, by wrapping every call that sends."""

    def __init__(self) -> None:
        self.large = 0
        self.small = 0
        self.calls = 0

    def isend(self, tensor, *args, **kwargs):
        self.calls += 1
        self.large += tensor.numel()
        return self.real_isend(tensor, *args, **kwargs)

    def all_reduce(self, tensor, *args, **kwargs):
        self.calls += 1
        self.small += tensor.numel()
        return self.real_all_reduce(tensor, *args, **kwargs)

    def refuse(self, *args, **kwargs):
        raise AssertionError("a step sent by another call")

    def __enter__(self):
        self.real_isend, self.real_all_reduce = dist.isend, dist.all_reduce
        names = ["broadcast", "all_gather_single", "reduce_scatter_single", "all_gather_object"]
        names += ["send", "all_gather", "reduce_scatter", "all_to_all_single", "reduce", "gather"]
        self.patches = [
            mock.patch.object(dist, "isend", self.isend),
            mock.patch.object(dist, "all_reduce", self.all_reduce),
            *(mock.patch.object(dist, name, self.refuse) for name in names),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def build(stage: int, num_blocks: int = 2, **options):
    torch.manual_seed(0)
    config = TinyGPTConfig(width=64, num_blocks=num_blocks)
    model = sw.shard(TinyGPT(config), stage=stage, chunk_bytes=60_000, **options)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters()), clip_grad_norm=1.0)
    return model, optimizer


def train_step(model, optimizer) -> None:
    tokens = torch.randint(61, (2, 11))
    optimizer.backward(model(tokens).float().logsumexp(-1).mean())
    optimizer.step()
    optimizer.zero_grad()
    with sw.full_parameters(model):
        pass


@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_sends_every_parameter_twice_less_the_own_share(stage: int) -> None:
    model, optimizer = build(stage)
    train_step(model, optimizer)
    with Counter() as counter:
        train_step(model, optimizer)
    chunks = optimizer._binding.engines()[0].chunks
    padded = sum(chunk.layout.numel for chunk in chunks)
    size = dist.get_world_size()
    assert counter.large == 2 * padded * (size - 1) // size
    assert counter.small <= SCALARS


@pytest.mark.world_size(2, 3, 4)
@pytest.mark.parametrize(("keep", "factor"), [(True, 3), (False, 2)])
def test_stage_3_sends_every_parameter_at_most_three_times(keep: bool, factor: int) -> None:
    """Twice where chunks are kept; the last of forward are there still when backward begins."""
    model, optimizer = build(3, num_blocks=6, reshard_after_forward=keep)

    def step() -> None:
        optimizer.backward(model(torch.randint(61, (2, 11))).float().logsumexp(-1).mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with Counter() as counter:
        step()
    chunks = optimizer._binding.engines()[0].chunks
    padded = sum(chunk.layout.numel for chunk in chunks)
    size = dist.get_world_size()
    least = 2 * padded * (size - 1) // size
    assert least <= counter.large <= factor * padded * (size - 1) // size
    assert keep or counter.large == least
    assert counter.small <= SCALARS


@pytest.mark.world_size(2)
def test_calls_grow_with_chunks_and_not_with_parameters() -> None:
    calls = {}
    for num_blocks in (1, 4):
        model, optimizer = build(2, num_blocks)
        train_step(model, optimizer)
        with Counter() as counter:
            train_step(model, optimizer)
        calls[num_blocks] = counter.calls - 2 * len(optimizer._binding.engines()[0].chunks)
    assert calls[1] == calls[4] <= 6


@pytest.mark.world_size(2)
def test_micro_batches_under_no_sync_send_nothing() -> None:
    model, optimizer = build(2)
    train_step(model, optimizer)
    with Counter() as counter, sw.no_sync(model):
        optimizer.backward(model(torch.randint(61, (2, 11))).sum())
    assert counter.calls == 0


class CopyCounter(TorchDispatchMode):
    """Records copies and allocations of at least a slice while gathers and reductions run."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if any(word in name for word in ("copy", "clone", "cat", "stack", "contiguous")):
            largest = max((a.numel() for a in args if isinstance(a, torch.Tensor)), default=0)
            if largest >= self.numel:
                self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_gathers_and_reductions_copy_nothing_of_the_size_of_a_slice(stage: int) -> None:
    from shardwise.runtime.collectives import Channel, start_all_gather, wait_all

    model, optimizer = build(stage)
    train_step(model, optimizer)
    engine = optimizer._binding.engines()[0]
    chunk = max(engine.chunks, key=lambda c: c.layout.numel)
    with CopyCounter(chunk.layout.slice_numel) as counter:
        wait_all(
            start_all_gather(chunk.parameters_C, engine.topology.shard, Channel.GATHER_PARAMETERS)
        )
        engine.reducer.reduction.start(chunk)()
    assert counter.seen == []
    engine.reducer.reduction.release(chunk)
