"""Which tensors training holds on this rank because of one optimizer; nothing is measured here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardwise.optimizer.binding import Binding


def held_storages(
    optimizer: torch.optim.Optimizer, binding: Binding
) -> dict[str, list[torch.Tensor]]:
    """Return the tensors behind an optimizer's members and state, by purpose."""
    held: dict[str, list[torch.Tensor]] = {}
    for engine in binding.engines():
        for purpose, tensors in engine.tensors().items():
            held.setdefault(purpose, []).extend(tensors)
    left_out = binding.left_out()
    held.setdefault("parameters", []).extend(left_out)
    held.setdefault("gradients", []).extend(p.grad for p in left_out if p.grad is not None)
    held["optimizer_state"] = [
        value
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    return held
