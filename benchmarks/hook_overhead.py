"""What stage 3 costs in Python, apart from communication and copies: microseconds per unit.

A stack of tiny blocks on one rank of a process group that sends nothing, beside the same stack
without shardwise. The difference per block is entering, leaving, gathering and releasing a unit,
and saving handles.

    python -m benchmarks.hook_overhead
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_BLOCKS = 50
NUM_STEPS = 40
_MICROSECONDS = 1e6


class Block(nn.Module):
    """Four parameters, as a norm and a linear layer have."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch."""
        return x + self.linear(self.norm(x))


def build() -> nn.Module:
    """Return the stack."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def measure(run: Callable[[], object]) -> float:
    """Return the median time of a call in microseconds, after a few calls."""
    times: list[float] = []
    for _ in range(NUM_STEPS):
        began_s = time.perf_counter()
        run()
        times.append((time.perf_counter() - began_s) * _MICROSECONDS)
    return median(times[5:])


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    x = torch.ones(1, 8)
    plain = build()

    def plain_step() -> None:
        plain(x).sum().backward()
        plain.zero_grad()

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    rows: dict[str, float] = {"plain": measure(plain_step)}
    for stage in (2, 3):
        model = sw.shard(build(), stage=stage)
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = sw.ShardedOptimizer(inner)

        def step(model: nn.Module = model, optimizer: sw.ShardedOptimizer = optimizer) -> None:
            optimizer.backward(model(x).sum())
            optimizer.zero_grad()

        rows[f"stage {stage}"] = measure(step)
    dist.destroy_process_group()
    for name, step_us in rows.items():
        more_us = (step_us - rows["plain"]) / NUM_BLOCKS
        print(f"{name:8} {step_us:8.0f} us a step, {more_us:6.1f} us more per block")


if __name__ == "__main__":
    main()
