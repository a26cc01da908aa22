"""Gradient norms of a fixed run by plain PyTorch, kept so that no release can shift them unseen.

``python -m tests.distributed.reduction.golden_norms`` writes the file again; it should not change.
Everything is float64 and computed from formulas, so neither seeds nor kernels matter.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

FILE = Path(__file__).with_suffix(".json")
NUM_STEPS = 5
NUM_SAMPLES = 8
"""Samples of one micro-batch over all ranks together."""
LEARNING_RATE = 0.05


def make_model() -> nn.Module:
    """Return a small model with values that look random and are not."""
    model = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 3))
    model.double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            steps = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_(0.4 * torch.sin(1.7 * steps + number).view_as(parameter))
    return model


def batch(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Return the inputs [8, 5] and targets [8, 3] of one micro-batch of all ranks."""
    start = 1000 * step + 100 * micro_batch
    inputs = torch.cos(torch.arange(start, start + NUM_SAMPLES * 5, dtype=torch.float64) * 0.9)
    targets = torch.sin(torch.arange(start, start + NUM_SAMPLES * 3, dtype=torch.float64) * 2.3)
    return inputs.view(NUM_SAMPLES, 5), targets.view(NUM_SAMPLES, 3)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, *, num_micro_batches: int) -> Tensor:
    """Return the loss whose gradients add up over micro-batches to those of their mean."""
    return (model(inputs) - targets).square().mean() / num_micro_batches


def norms_of_one_process(num_micro_batches: int) -> list[float]:
    """Train in one process and return the norm of every step."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    norms = []
    for step in range(NUM_STEPS):
        for micro_batch in range(num_micro_batches):
            inputs, targets = batch(step, micro_batch)
            loss_of(model, inputs, targets, num_micro_batches=num_micro_batches).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


if __name__ == "__main__":
    golden = {str(count): norms_of_one_process(count) for count in (1, 2, 4)}
    FILE.write_text(json.dumps(golden, indent=2) + "\n")
