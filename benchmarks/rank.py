"""One rank of one contestant: a process that waits for orders and measures itself.

It speaks with the driver over a pipe and with the other rank over gloo. Between orders it blocks,
so that the contestant whose turn it is has the machine for itself.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks import resident
from benchmarks.contestants import Contestant, Dtype, make_step
from benchmarks.gpt import GPT, GPTConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from torch import Tensor

_NUM_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank is told when it starts."""

    contestant: Contestant
    config: GPTConfig
    dtype: Dtype
    chunk_bytes: int | None
    rank: int
    world_size: int
    store: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """Run one step for warmth and then so many timed ones."""

    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What one rank saw in one round."""

    step_s: float
    sent_bytes: int
    """Per step, by all processes over the loopback device."""
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOrder:
    """Build the contestant, train three steps, and say what that held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """Bytes that came to be resident since before the model was made."""

    held_bytes: int
    peak_bytes: int


def run_rank(spec: RankSpec, orders: Connection) -> None:
    """Serve orders until the pipe closes; an exception travels to the driver as text.

    Without a driver that reads it there is nobody to tell, and the rank ends in silence.
    """
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{spec.store}",
            rank=spec.rank,
            world_size=spec.world_size,
        )
        _serve(spec, orders)
        dist.destroy_process_group()
    except Exception:  # whatever it is, the driver raises it
        with contextlib.suppress(OSError):
            orders.send(traceback.format_exc())


def _serve(spec: RankSpec, orders: Connection) -> None:
    step: Callable[[], Tensor] | None = None
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        if isinstance(order, MemoryOrder):
            orders.send(_measure_memory(spec))
            continue
        step = step or _build(spec)
        orders.send(_measure_round(step, order.num_steps))


def _build(spec: RankSpec) -> Callable[[], Tensor]:
    """Make model and batches, the same ones for every contestant."""
    torch.manual_seed(0)
    model = GPT(spec.config)
    step = make_step(spec.contestant, model, dtype=spec.dtype, chunk_bytes=spec.chunk_bytes)
    generator = torch.Generator().manual_seed(1 + spec.rank)
    shape = (_NUM_BATCHES, spec.config.batch, spec.config.sequence + 1)
    batches = torch.randint(spec.config.vocabulary, shape, generator=generator)
    turn = 0

    def next_step() -> Tensor:
        nonlocal turn
        turn += 1
        return step(batches[turn % _NUM_BATCHES])

    return next_step


def _measure_round(step: Callable[[], Tensor], num_steps: int) -> RoundResult:
    """Time steps between two barriers."""
    step()
    gc.collect()
    gc.disable()
    dist.barrier()
    sent_bytes = _loopback_sent_bytes()
    began_s = time.perf_counter()
    loss = torch.zeros(())
    for _ in range(num_steps):
        loss = step()
    dist.barrier()
    elapsed_s = time.perf_counter() - began_s
    sent_bytes = _loopback_sent_bytes() - sent_bytes
    gc.enable()
    return RoundResult(
        step_s=elapsed_s / num_steps, sent_bytes=sent_bytes // num_steps, loss=loss.item()
    )


def _measure_memory(spec: RankSpec) -> MemoryResult:
    """Compare residency before the model was made, between steps, and at the height of one."""
    _warm_libraries(spec)
    before_bytes = resident.resident_bytes()
    step = _build(spec)
    step()
    step()
    gc.collect()
    resident.reset_peak()
    step()
    gc.collect()
    return MemoryResult(
        held_bytes=resident.resident_bytes() - before_bytes,
        peak_bytes=resident.peak_resident_bytes() - before_bytes,
    )


def _warm_libraries(spec: RankSpec) -> None:
    """Train a toy, so that what libraries load and cache is there before the first reading."""
    toy = GPTConfig(width=32, num_blocks=1, num_heads=2, vocabulary=64, sequence=16, batch=2)
    model = GPT(toy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    is_bf16 = spec.dtype == "bf16"
    with partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=is_bf16)():
        loss = model(torch.zeros(2, 17, dtype=torch.int64))
    loss.backward()
    optimizer.step()
    dist.all_reduce(torch.zeros(2**18))
    del model, optimizer, loss
    gc.collect()


def _loopback_sent_bytes() -> int:
    """Read the loopback device's counter of bytes sent; it counts every process on the machine."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0
