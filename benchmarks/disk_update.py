"""An update of state that rests on disk, beside what the disk gives for the same bytes.

64 M float32 parameters with AdamW in 16 chunks: master and two moments, 768 MiB that are read,
updated and written. The limit is a plain sequential read, then write, of as many bytes past the
page cache, in blocks of the same size, by calls one after the other; it takes part twice. *Both at
once* is the same with a thread for each direction. Rounds are interleaved.

    python -m benchmarks.disk_update --rounds 7 --folder /somewhere/on/a/disk
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from threading import Thread
from typing import TYPE_CHECKING

import torch
from torch import nn

import shardwise as sw
from benchmarks.results_table import MIB, describe_machine
from shardwise.optimizer.update_gradient import Factors
from shardwise.tiers import DiskOptions

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, NUM_LAYERS = 2048, 16
NUM_SLICES = 3
"""Master and two moments."""
_BASELINE = "raw"


class Raw:
    """A file of as many bytes, read and written in order."""

    OPEN_FLAGS = os.O_RDWR | os.O_TMPFILE | os.O_DIRECT

    def __init__(self, folder: Path, num_bytes: int, block_bytes: int) -> None:
        """Write it once, so that its space exists."""
        self._descriptor = os.open(folder, self.OPEN_FLAGS, 0o600)
        os.posix_fallocate(self._descriptor, 0, num_bytes)
        self._offsets = range(0, num_bytes, block_bytes)
        self._buffers = [mmap.mmap(-1, block_bytes) for _ in range(2)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(block_bytes)
        self.write()

    def read(self) -> None:
        """Read all."""
        for offset in self._offsets:
            os.preadv(self._descriptor, [self._buffers[0]], offset)

    def write(self) -> None:
        """Write all."""
        for offset in self._offsets:
            os.pwritev(self._descriptor, [self._buffers[1]], offset)

    def both(self) -> None:
        """Read all, then write all."""
        self.read()
        self.write()

    def both_at_once(self) -> None:
        """Read and write side by side."""
        threads = [Thread(target=self.read), Thread(target=self.write)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Sharded:
    """``shardwise`` on one rank with its state on disk."""

    def __init__(self, folder: Path) -> None:
        """Shard the model, give it a gradient that stays, and make its state."""
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
        choice = sw.StaticOffload(optimizer=1.0, to="disk", disk_path=folder)
        model = sw.shard(
            nn.Sequential(*layers), stage=2, offload=choice, chunk_bytes=4 * WIDTH * WIDTH
        )
        inner = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.optimizer = sw.ShardedOptimizer(inner)
        self.optimizer.backward(model(torch.ones(1, WIDTH)).square().mean())
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """The update alone."""
        [engine] = self.optimizer._binding.engines()
        self.optimizer._binding.refresh()
        self.optimizer._stepper.step(Factors({engine: 1.0}, 1.0))
        engine.settle_moves()


def main() -> None:
    """Read options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        _measure(Path(name), options.rounds)


def _measure(folder: Path, num_rounds: int) -> None:
    """Run interleaved rounds and print medians and ratios."""
    block_bytes = DiskOptions(folder=folder).piece_bytes
    num_bytes = NUM_SLICES * 4 * WIDTH * WIDTH * NUM_LAYERS
    raw, sharded = Raw(folder, num_bytes, block_bytes), Sharded(folder)
    runs: dict[str, Callable[[], None]] = {
        _BASELINE: raw.both,
        "raw again": raw.both,
        "raw, both at once": raw.both_at_once,
        "shardwise": sharded.update,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds + 1):
        for name, run in runs.items():
            began_s = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began_s)
    print(describe_machine())
    print(
        f"{num_bytes / MIB:.0f} MiB read and written, blocks of {block_bytes / MIB:.0f} MiB, "
        f"{num_rounds} rounds"
    )
    times = {name: all_s[1:] for name, all_s in times.items()}
    for name, all_s in times.items():
        ratios = [base_s / own_s for base_s, own_s in zip(times[_BASELINE], all_s, strict=True)]
        speed = 2 * num_bytes / median(all_s) / 1e9
        print(
            f"{name:18} {median(all_s):5.2f} s ({min(all_s):.2f} - {max(all_s):.2f})  "
            f"{speed:4.2f} GB/s  {median(ratios):5.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
            "of raw"
        )


if __name__ == "__main__":
    main()
