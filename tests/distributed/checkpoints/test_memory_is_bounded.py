"""Saving and loading stream: beyond the state itself they hold two chunks and a buffer at most."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import shardwise as sw

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 2 * 2**20
BUFFER_BYTES = 5 * 2**20
"""The writer's two blocks, and what Python itself needs."""
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_allocator = ctypes.CDLL(None)
_MMAP_THRESHOLD = -3
"""Of mallopt: the bytes from which a piece of memory is mapped alone."""


def _resident_bytes(what: str) -> int:
    line = next(one for one in _STATUS.read_text().splitlines() if one.startswith(what))
    return int(line.split()[1]) * 1024


def _make_allocator_exact() -> None:
    """Let the allocator take all that is large from the system, and give it back.

    What it keeps of earlier calls would serve later ones unseen, and holes that small things have
    settled in would count: so from the start.
    """
    _allocator.mallopt(_MMAP_THRESHOLD, 2**16)


def _peak_bytes(action: Callable[[], object]) -> int:
    """Return by how much an action raises the memory of this process at its highest.

    The least of three times, for other threads allocate as well.
    """
    peaks = []
    for _ in range(3):
        gc.collect()
        _allocator.malloc_trim(0)
        _RESET.write_text("5")
        before = _resident_bytes("VmRSS")
        action()
        peaks.append(_resident_bytes("VmHWM") - before)
    return min(peaks)


@pytest.mark.skipif(not _RESET.exists(), reason="Linux alone tells the peak of one call")
@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("stage", [2, 3])
def test_saving_and_loading_hold_two_chunks_at_most(stage: int, tmp_path: Path) -> None:
    _make_allocator_exact()
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(24)])  # 24 MiB
    sw.shard(model, stage=stage, chunk_bytes=CHUNK_BYTES)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    optimizer.backward(model(torch.randn(1, 512)).sum())
    optimizer.step()
    optimizer.zero_grad()
    calls = {
        "save": lambda: sw.save(tmp_path / "checkpoint", model, optimizer),
        "load": lambda: sw.load(tmp_path / "checkpoint", model, optimizer),
    }
    for name, call in calls.items():
        call()  # what is imported and cached once
        peak = _peak_bytes(call)
        assert peak <= 2 * CHUNK_BYTES + BUFFER_BYTES, (name, peak / 2**20)


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_rests_on_disk_passes_through_the_host_chunk_by_chunk(
    stage: int, async_: bool, tmp_path: Path
) -> None:
    """Counted by the tier itself: three or four slices of half a chunk, of 12 chunks."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(24)])
    offload = sw.StaticOffload(
        optimizer=1.0, parameters=float(stage == 3), to="disk", disk_path=tmp_path
    )
    sw.shard(model, stage=stage, chunk_bytes=CHUNK_BYTES, offload=offload)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    optimizer.backward(model(torch.randn(1, 512)).sum())
    optimizer.step()
    optimizer.zero_grad()
    (engine,) = optimizer._binding.engines()
    assert engine.offload is not None
    host = engine.offload.mover.tiers.host

    def save() -> None:
        pending = sw.save(tmp_path / "checkpoint", model, optimizer, async_=async_)
        if pending is not None:
            pending.wait()

    for call in (save, lambda: sw.load(tmp_path / "checkpoint", model, optimizer)):
        engine.settle_moves()
        before = host.allocated_bytes
        host.reset_peak()
        call()
        assert 0 < host.peak_bytes - before <= 2 * CHUNK_BYTES
        assert host.allocated_bytes == before


@pytest.mark.skipif(not _RESET.exists(), reason="Linux alone tells the peak of one call")
@pytest.mark.world_size(1, timeout_s=60)
def test_an_export_holds_one_tensor_and_its_cast_at_most(tmp_path: Path) -> None:
    _make_allocator_exact()
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])  # 32 MiB
    largest_bytes = 4 * 2**20
    sw.save(tmp_path / "checkpoint", model)

    def export() -> object:
        return sw.export(tmp_path / "checkpoint", tmp_path / "out", dtype=torch.bfloat16)

    export()
    peak = _peak_bytes(export)
    assert peak <= 1.5 * largest_bytes + BUFFER_BYTES, peak / 2**20
