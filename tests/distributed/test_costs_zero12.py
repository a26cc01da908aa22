"""What a step may cost: messages and waits by chunks, not by parameters; and nothing that stays."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.compat.colossalai import ColoDDP
from shardwise.runtime.managed import record_of
from tests.kit.faces import Face, for_each_cell, wrap

sgd = partial(torch.optim.SGD, lr=0.01)
CALLS = ("isend", "irecv", "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")


class Deep(nn.Module):
    """Many small layers, in few chunks."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Traffic:
    """Counts calls and bytes of torch.distributed while a patch is in place."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.sent_bytes = 0
        for name in CALLS:
            patch.setattr(dist, name, partial(self._count, name, getattr(dist, name)))

    def _count(self, name: str, real: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        if name == "isend":
            self.sent_bytes += tensor.numel() * tensor.element_size()
        return real(tensor, *args, **kwargs)


class Waits(TorchDispatchMode):
    """Counts reads of device values by the host, and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = self.num_casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        self.num_casts += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def take_step(model: nn.Module, optimizer: Any) -> None:
    """One pass and one update."""
    optimizer.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()


def chunks_of(model: nn.Module) -> list[Any]:
    """The chunks of a sharded model."""
    record = record_of(next(model.parameters()))
    assert record is not None
    return record.engine.chunks


@pytest.mark.world_size(2, 3, timeout_s=90)
@for_each_cell
def test_a_step_communicates_by_chunks_not_by_parameters(world_size: int, face: Face, stage: int):
    """One gather per parameter, each with padding and copies of its own, is what this must not be.

    Two exchanges of a chunk, each a send and a receive for every other rank, and a few scalars.
    """
    for num_layers in (2, 60):
        model = Deep(num_layers)
        optimizer = wrap(face, model, sgd, stage=stage)
        take_step(model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            traffic = Traffic(patch)
            take_step(model, optimizer)
            list(map(torch.clone, model.parameters()))  # waits for what the step has sent
        chunks = chunks_of(model)
        assert len(chunks) < 10
        assert len(traffic.calls) <= len(chunks) * 2 * 2 * (world_size - 1) + 5, traffic.calls
        assert traffic.calls.count("isend") == len(chunks) * 2 * (world_size - 1)


@pytest.mark.world_size(2, 3)
@for_each_cell
def test_a_step_sends_each_chunk_once_reduced_and_once_gathered(
    world_size: int, face: Face, stage: int
):
    """An all-reduce of whole gradients, of which a rank needs its own part, sends twice as much."""
    model = Deep(40)
    optimizer = wrap(face, model, sgd, stage=stage)
    take_step(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        traffic = Traffic(patch)
        take_step(model, optimizer)
    whole_bytes = sum(chunk.layout.numel * 4 for chunk in chunks_of(model))
    assert traffic.sent_bytes == 2 * whole_bytes * (world_size - 1) // world_size
    used_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert whole_bytes < 1.1 * used_bytes + 1024


@pytest.mark.world_size(2)
@for_each_cell
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_step_waits_and_casts_by_chunks_not_by_parameters(
    face: Face, stage: int, param_dtype: torch.dtype | None
):
    """Testing every gradient for overflow by itself costs a copy and a wait for each of them."""
    counts = []
    for num_layers in (2, 60):
        model = Deep(num_layers)
        optimizer = wrap(
            face, model, sgd, stage=stage, param_dtype=param_dtype, clip_grad_norm=1e-3
        )
        for is_counted in (False, True):
            optimizer.backward(model(torch.ones(2, 8, dtype=param_dtype)).float().sum())
            if not is_counted:
                optimizer.step()
                optimizer.zero_grad()
        with Waits() as waits:
            optimizer.step()
        counts.append((waits.num_reads, waits.num_casts, len(chunks_of(model))))
    (few_reads, few_casts, few), (many_reads, many_casts, many) = counts
    assert many_reads <= few_reads + 2 * (many - few), counts
    assert many_casts <= few_casts + 6 * (many - few), counts
    assert many_reads < 10


@pytest.mark.world_size(2, timeout_s=90)
@for_each_cell
def test_thirty_steps_leave_no_more_objects_than_three(face: Face, stage: int):
    """A map from gradients to parameters that is never cleared grows by an entry for each."""
    model = Deep(2)
    optimizer = wrap(face, model, partial(torch.optim.Adam, lr=0.01), stage=stage)
    counts = []
    for num_steps in (3, 30):
        for _ in range(num_steps):
            take_step(model, optimizer)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[1] <= counts[0] + 5, counts


@pytest.mark.world_size(1, 2, timeout_s=90)
@for_each_cell
def test_a_deleted_optimizer_and_its_model_are_collected(face: Face, stage: int):
    """Hooks that cannot be removed keep the optimizer, its thread and every buffer for ever."""
    num_threads = threading.active_count()
    model = Deep(2)
    optimizer = wrap(face, model, partial(torch.optim.Adam, lr=0.01), stage=stage)
    take_step(model, optimizer)
    watched = [
        weakref.ref(one)
        for one in (model, optimizer, optimizer.unwrap(), chunks_of(model)[0], *model.parameters())
    ]
    if face != "module":
        del optimizer
        gc.collect()
        model(torch.ones(1, 8)).sum().backward()  # the model outlives it as a plain one
        assert all(type(p.grad) is Tensor for p in model.parameters())
        assert record_of(next(model.parameters())) is None
    else:
        del optimizer
    del model
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    for _ in range(100):
        if threading.active_count() == num_threads:
            break
        threading.Event().wait(0.02)
    assert threading.active_count() == num_threads


@pytest.mark.world_size(2)
def test_a_deleted_data_parallel_module_is_collected():
    model = ColoDDP(Deep(2))
    for _ in range(2):
        model.backward(model(torch.ones(1, 8)).sum())
    watched = [weakref.ref(one) for one in (model, model.module, *model.parameters())]
    del model
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


@pytest.mark.world_size(2)
@for_each_cell
def test_parameters_may_be_sharded_again_after_their_optimizer_is_gone(face: Face, stage: int):
    """A second optimizer of the same model trains it; the first has left nothing behind."""
    model = Deep(2)
    optimizer: Any = wrap(face, model, sgd, stage=stage)
    take_step(model, optimizer)
    del optimizer
    gc.collect()
    if face == "module":
        optimizer = sw.ShardedOptimizer(sgd(list(model.parameters())))
    else:
        optimizer = wrap(face, model, sgd, stage=stage)
    before = [p.detach().clone() for p in model.parameters()]
    take_step(model, optimizer)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert not torch.equal(parameter, value)
        everywhere = parameter.detach().clone()
        dist.broadcast(everywhere, 0)
        assert torch.equal(everywhere, parameter)
