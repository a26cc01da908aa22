"""What part of an offloaded training step is spent waiting for transfers.

A stack of linear layers in bfloat16 on one rank at stage 3, AdamW with float32 masters, everything
offloaded to host, then to disk. The gradient of a step comes of 1, 2 or 4 micro-batches: state
moves once a step, slices of parameters once a pass. Waiting is what the training thread spends in
waits for copies, and in copies that it makes itself while a chunk is gathered.

    python -m benchmarks.exposed_waiting --rounds 7 --folder /somewhere/on/a/disk
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import shardwise as sw
from benchmarks.results_table import describe_machine
from shardwise.runtime.own_slices import OwnSlices
from shardwise.tiers import Transfer

if TYPE_CHECKING:
    from collections.abc import Generator

WIDTH, NUM_LAYERS, BATCH = 1536, 12, 512
_MILLI = 1e3


class Stopwatch:
    """Adds up the time of some methods, the outermost call of nested ones."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.total_s = 0.0
        self._depth = 0

    @contextmanager
    def on(self, owner: type, name: str) -> Generator[None]:
        """Time a method of a class inside the context."""
        real = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the method takes
            self._depth += 1
            began_s = time.perf_counter()
            try:
                return real(*args, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.total_s += time.perf_counter() - began_s

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, real)


class Trainer:
    """A model that is offloaded one way."""

    def __init__(self, offload: sw.StaticOffload | None) -> None:
        """Shard it."""
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS)]
        self.model = sw.shard(
            nn.Sequential(*layers),
            stage=3,
            mixed_precision=sw.MixedPrecision(param_dtype=torch.bfloat16),
            offload=offload,
        )
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.optimizer = sw.ShardedOptimizer(inner)

    def step(self, num_micro_batches: int) -> None:
        """Train one step."""
        for _ in range(num_micro_batches):
            x = torch.ones(BATCH, WIDTH, dtype=torch.bfloat16)
            self.optimizer.backward(self.model(x).float().square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    """Read options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        _measure(folder, options.rounds)


def _measure(folder: str, num_rounds: int) -> None:
    """Run interleaved rounds and print medians."""
    everything = {"optimizer": 1.0, "parameters": 1.0}
    trainers = {
        "not offloaded": Trainer(None),
        "not offloaded again": Trainer(None),
        "host": Trainer(sw.StaticOffload(**everything, to="host")),
        "disk": Trainer(sw.StaticOffload(**everything, to="disk", disk_path=folder)),
    }
    cells = [(name, count) for count in (1, 2, 4) for name in trainers]
    steps: dict[tuple[str, int], list[tuple[float, float]]] = {cell: [] for cell in cells}
    for number in range(num_rounds + 1):
        for name, count in cells:
            watch = Stopwatch()
            began_s = time.perf_counter()
            with watch.on(Transfer, "wait"), watch.on(OwnSlices, "fill_own"):
                trainers[name].step(count)
            if number:
                took_s = time.perf_counter() - began_s
                steps[name, count].append((took_s, watch.total_s))
    print(describe_machine())
    numel = sum(p.numel() for p in trainers["host"].model.parameters())
    print(f"{numel / 1e6:.1f} M parameters in bfloat16, {num_rounds} rounds")
    for name, count in cells:
        times_s, waits_s = zip(*steps[name, count], strict=True)
        shares = [wait_s / time_s for time_s, wait_s in steps[name, count]]
        print(
            f"{name:20} {count} micro-batches: step {median(times_s) * _MILLI:6.0f} ms, "
            f"waiting {median(waits_s) * _MILLI:6.1f} ms ({min(waits_s) * _MILLI:.1f} - "
            f"{max(waits_s) * _MILLI:.1f}), {median(shares):6.1%} of the step"
        )


if __name__ == "__main__":
    main()
