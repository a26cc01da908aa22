"""The update of 32 M elements in host memory beside torch's fused AdamW: float32, and 16-bit.

float32: the fused kernel alone, and ``shardwise`` around it. 16-bit training with float32 masters,
bfloat16 gradient in and bfloat16 parameter out: the three passes of torch operators (with a fresh
float32 gradient, as a training loop makes it, and with one that is kept), one compiled pass written
by hand, and ``shardwise``. Of ``shardwise`` the update alone is timed, as of the others, and the
whole ``step``, which looks at every gradient before. Contestants take turns, the first of each
table takes part twice, bits are compared with those of torch's operators after the last round.

    python -m benchmarks.host_update --rounds 9 --threads 2
"""

from __future__ import annotations

import argparse
import logging
import time
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.results_table import describe_machine
from shardwise.optimizer.update_gradient import Factors

if TYPE_CHECKING:
    from collections.abc import Callable

NUMEL = 32 * 2**20
OPTIONS = {"lr": 1e-3, "weight_decay": 0.01}
_BYTES_PER_ELEMENT = 28
_MILLI = 1e3


class OneParameter(nn.Module):
    """A module of one parameter, whose gradient is what is asked for."""

    def __init__(self, value: Tensor) -> None:
        """Take a copy of the value."""
        super().__init__()
        self.weight = nn.Parameter(value.clone())

    def forward(self, gradient: Tensor) -> Tensor:
        """Return a loss of that gradient."""
        return (self.weight * gradient.to(self.weight.dtype)).sum()


class Plain:
    """Torch's optimizer on a float32 tensor."""

    def __init__(self, value: Tensor, gradient: Tensor) -> None:
        """Take copies; ``gradient`` in the dtype that it comes in."""
        self.gradient = gradient
        self.master = nn.Parameter(value.clone())
        self.working = value.to(gradient.dtype)
        self.kept = gradient.float()
        self.optimizer = torch.optim.AdamW([self.master], fused=True, **OPTIONS)

    def fused(self) -> None:
        """Update with a float32 gradient that is there."""
        self.master.grad = self.kept
        self.optimizer.step()

    def three_passes(self) -> None:
        """Widen, update, round."""
        self.master.grad = self.gradient.float()
        self.optimizer.step()
        self.working.copy_(self.master.detach())
        self.master.grad = None

    def three_passes_kept(self) -> None:
        """The same over a float32 gradient that is never given back."""
        self.master.grad = self.kept.copy_(self.gradient)
        self.optimizer.step()
        self.working.copy_(self.master.detach())


class Compiled:
    """One pass, written by hand and compiled: other bits than torch's kernel."""

    def __init__(self, value: Tensor, gradient: Tensor) -> None:
        """Take copies."""
        self.gradient = gradient
        self.master, self.working = value.clone(), value.to(gradient.dtype)
        self.mean, self.square = torch.zeros_like(value), torch.zeros_like(value)
        self.num_steps = 0
        self.run = torch.compile(_one_pass, dynamic=True, fullgraph=True)

    def step(self) -> None:
        """Update."""
        self.num_steps += 1
        first, second = (1 - beta**self.num_steps for beta in (0.9, 0.999))
        numbers = torch.tensor([OPTIONS["lr"] / first, second])
        moments = (self.mean, self.square)
        self.run(self.gradient, self.master, moments, self.working, numbers)


def _one_pass(
    gradient: Tensor,
    master: Tensor,
    moments: tuple[Tensor, Tensor],
    working: Tensor,
    numbers: Tensor,
) -> None:
    """AdamW in one pass over memory."""
    mean, square = moments
    wide = gradient.float()
    new_mean = mean + (wide - mean) * 0.1
    new_square = square * 0.999 + wide * wide * 0.001
    decayed = master * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
    updated = decayed - numbers[0] * new_mean / ((new_square / numbers[1]).sqrt() + 1e-8)
    mean.copy_(new_mean)
    square.copy_(new_square)
    master.copy_(updated)
    working.copy_(updated)


class Sharded:
    """``shardwise`` on one rank."""

    def __init__(self, value: Tensor, gradient: Tensor) -> None:
        """Shard a module of one parameter and give it a gradient, which stays."""
        half = sw.MixedPrecision(param_dtype=gradient.dtype)
        precision = None if gradient.dtype is value.dtype else half
        self.model = sw.shard(OneParameter(value), stage=2, mixed_precision=precision)
        inner = torch.optim.AdamW(self.model.parameters(), fused=True, **OPTIONS)
        self.optimizer = sw.ShardedOptimizer(inner)
        self.optimizer.backward(self.model(gradient))

    def step(self) -> None:
        """The whole step."""
        self.optimizer.step()

    @torch.no_grad()
    def update(self) -> None:
        """The update alone."""
        [engine] = self.optimizer._binding.engines()
        self.optimizer._stepper.step(Factors({engine: 1.0}, 1.0))


def _contestants(dtype: torch.dtype) -> tuple[dict[str, Callable[[], None]], Callable[[], bool]]:
    """Return what takes part, baseline first, and whether bits are equal after the last round."""
    torch.manual_seed(0)
    value, gradient = torch.randn(NUMEL), torch.randn(NUMEL).to(dtype)
    plain, again = Plain(value, gradient), Plain(value, gradient)
    own, whole = Sharded(value, gradient), Sharded(value, gradient)

    def is_equal() -> bool:
        masters = own.optimizer.param_groups[0]["params"][0]
        working = plain.master if dtype is torch.float32 else plain.working
        return torch.equal(masters, plain.master) and torch.equal(own.model.weight, working)

    if dtype is torch.float32:
        runs = {
            "AdamW(fused)": plain.fused,
            "AdamW(fused) again": again.fused,
            "shardwise, update": own.update,
            "shardwise, step": whole.step,
        }
        return runs, is_equal
    kept, compiled = Plain(value, gradient), Compiled(value, gradient)
    runs = {
        "cast + fused + cast": plain.three_passes,
        "cast + fused + cast again": again.three_passes,
        "the same, gradient kept": kept.three_passes_kept,
        "one compiled pass": compiled.step,
        "shardwise, update": own.update,
        "shardwise, step": whole.step,
    }
    return runs, is_equal


def _measure(dtype: torch.dtype, num_rounds: int) -> None:
    """Run interleaved rounds and print medians and ratios."""
    runs, is_equal = _contestants(dtype)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds + 2):
        for name, run in runs.items():
            began_s = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began_s)
    times = {name: all_s[2:] for name, all_s in times.items()}
    baseline, *_ = times.values()
    print(f"\n{str(dtype).removeprefix('torch.')} gradients, {num_rounds} rounds")
    print(f"bits of shardwise are those of {next(iter(runs))}: {is_equal()}")
    for name, all_s in times.items():
        ratios = [base_s / own_s for base_s, own_s in zip(baseline, all_s, strict=True)]
        speed = _BYTES_PER_ELEMENT * NUMEL / median(all_s) / 1e9
        print(
            f"{name:27} {median(all_s) * _MILLI:6.1f} ms ({min(all_s) * _MILLI:.1f} - "
            f"{max(all_s) * _MILLI:.1f})  {speed:5.1f} GB/s  {median(ratios):5.2f} "
            f"({min(ratios):.2f} - {max(ratios):.2f}) of the baseline's speed"
        )


def main() -> None:
    """Read options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    print(describe_machine())
    print(f"{NUMEL // 2**20} M elements, {options.threads} threads")
    for dtype in (torch.float32, torch.bfloat16):
        _measure(dtype, options.rounds)


if __name__ == "__main__":
    main()
