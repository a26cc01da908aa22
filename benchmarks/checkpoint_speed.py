"""Saving and loading beside raw ``dcp`` of the same bytes, and the stall of an asynchronous save.

30 M parameters with AdamW (360 MB) on two ranks of one thread, stage 3. Raw ``dcp`` writes the same
slices as plain tensors and hashes nothing; ``shardwise`` hashes, flushes folders, publishes by one
rename and verifies every byte when it loads. Rounds are interleaved, the baseline takes part twice,
every save makes new files, every load reads them from the device.

    python -m benchmarks.checkpoint_speed --rounds 7 --folder /somewhere/on/a/disk
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn

import shardwise as sw
from benchmarks.results_table import describe_machine

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD_SIZE = 2
WIDTH, NUM_LAYERS = 1024, 29
_MIB = 2**20
BASELINE = "dcp"


def _prepare() -> tuple[nn.Module, sw.ShardedOptimizer, dict[str, torch.Tensor]]:
    """Return a trained model with its optimizer, and plain copies of what this rank holds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    sw.shard(model, stage=3)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    optimizer.backward(model(torch.randn(2, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    rank = dist.get_rank()
    copies: dict[str, torch.Tensor] = {}
    for number, (piece, state) in enumerate(optimizer.state.items()):
        own = {"value": piece, **state} if isinstance(piece, torch.Tensor) else state
        for name, value in own.items():
            copies[f"{rank}.{number}.{name}"] = value.detach().clone()
    return model, optimizer, copies


def _time(run: Callable[[], object]) -> float:
    """Return how long the slower rank takes."""
    dist.barrier()
    began_s = time.perf_counter()
    run()
    took_s = torch.tensor(time.perf_counter() - began_s)
    dist.all_reduce(took_s, op=dist.ReduceOp.MAX)
    return took_s.item()


def _forget(folder: Path) -> None:
    """Drop a checkpoint from the operating system's cache, as a restart elsewhere does."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _round(
    folder: Path,
    model: nn.Module,
    optimizer: sw.ShardedOptimizer,
    copies: dict[str, torch.Tensor],
) -> dict[str, float]:
    """Return what one round took."""
    times: dict[str, float] = {}
    for name in (BASELINE, "dcp again"):
        path = folder / name
        times[f"save {name}"] = _time(lambda path=path: dcp.save(copies, checkpoint_id=path))
        _forget(path)
        times[f"load {name}"] = _time(lambda path=path: dcp.load(dict(copies), checkpoint_id=path))
    path = folder / "shardwise"
    times["save shardwise"] = _time(lambda: sw.save(path, model, optimizer))
    _forget(path)
    times["load shardwise"] = _time(lambda: sw.load(path, model, optimizer))
    beside: list[sw.checkpoint.PendingSave | None] = []
    times["stall of async_=True"] = _time(
        lambda: beside.append(sw.save(folder / "beside", model, optimizer, async_=True))
    )
    for pending in beside:
        if pending is not None:
            pending.wait()
    return times


def _run(rank: int, folder: Path, num_rounds: int) -> None:
    """Be one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    model, optimizer, copies = _prepare()
    num_bytes = sum(value.nbytes for value in copies.values())
    rounds: list[dict[str, float]] = []
    for number in range(num_rounds + 1):
        own = folder / str(number)
        if rank == 0:
            own.mkdir()
        dist.barrier()
        rounds.append(_round(own, model, optimizer, copies))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(own)
    if rank == 0:
        _print(rounds[1:], WORLD_SIZE * num_bytes)
    dist.destroy_process_group()


def _print(rounds: list[dict[str, float]], num_bytes: int) -> None:
    """Print medians, and ratios round by round."""
    print(describe_machine())
    print(f"{num_bytes / _MIB:.0f} MiB on {WORLD_SIZE} ranks, {len(rounds)} rounds")
    for name in rounds[0]:
        times = [one[name] for one in rounds]
        kind = name.split()[0]
        base = f"{kind} {BASELINE}" if kind in ("save", "load") else "save shardwise"
        ratios = [one[base] / one[name] for one in rounds]
        share = [1 / ratio for ratio in ratios]
        shown, what = (share, "of a save") if kind == "stall" else (ratios, "of dcp's bandwidth")
        print(
            f"{name:22} {median(times):6.2f} s ({min(times):.2f} - {max(times):.2f})  "
            f"{median(shown):5.2f} ({min(shown):.2f} - {max(shown):.2f}) {what}"
        )


def main() -> None:
    """Read options and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mp.spawn(_run, (Path(folder), options.rounds), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
