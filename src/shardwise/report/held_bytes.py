"""Bytes that training holds on this rank, measured over the storages that can be reached.

A storage is counted whole and once, however many tensors look into it: a view of one element keeps
all of its storage alive. Activations, communication buffers and the allocator's own slack are not
counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shardwise.optimizer import ShardedOptimizer
from shardwise.runtime.absent import Absent
from shardwise.runtime.placeholder import ShardedGradient

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes per category; each storage belongs to one."""

    parameters: int
    """Parameters and buffers that forward uses, on the accelerator like the next two."""

    gradients: int
    """Gradients that exist now; none between ``zero_grad()`` and the next backward."""

    optimizer_state: int
    """What the optimizer keeps between steps, masters included."""

    host: int = 0
    """State of any kind that rests in host memory."""

    disk: int = 0
    """State of any kind that rests on disk."""

    @property
    def total(self) -> int:
        """Sum over what is on the accelerator."""
        return self.parameters + self.gradients + self.optimizer_state


def held_bytes(model: nn.Module, optimizer: Optimizer) -> HeldBytes:
    """Measure what a model and its optimizer hold on this rank; no communication.

    Args:
        model: Sharded or plain.
        optimizer: A ``ShardedOptimizer`` or any optimizer of torch.

    Returns:
        Bytes of the storages reachable from the two. A storage that several categories reach counts
        for the first of parameters, gradients, optimizer state.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 5, bias=False)
        >>> held_bytes(model, torch.optim.SGD(model.parameters(), lr=0.1))
        HeldBytes(parameters=60, gradients=0, optimizer_state=0)
    """
    named: Mapping[str, list[Tensor]] = {}
    if isinstance(optimizer, ShardedOptimizer):
        named = optimizer.held_storages()
    weights = [*model.parameters(), *model.buffers()]
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in (*weights, *grouped) if p.grad is not None]
    state = _tensors([optimizer.state, optimizer.param_groups])
    seen: set[int] = set()
    return HeldBytes(
        host=_count(named.get("host", ()), seen),
        disk=_count(named.get("disk", ()), seen),
        parameters=_count([*named.get("parameters", ()), *weights], seen),
        gradients=_count([*named.get("gradients", ()), *gradients], seen),
        optimizer_state=_count(
            [*named.get("masters", ()), *named.get("optimizer_state", ()), *state], seen
        ),
    )


def _count(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Add up storages not seen before, and remember them."""
    num_bytes = 0
    for tensor in tensors:
        if isinstance(tensor, ShardedGradient | Absent):
            continue  # it describes what lies elsewhere, and holds no bytes
        storage = tensor.untyped_storage()
        key = storage._cdata  # the storage itself: its data pointer may be shared or null
        if key not in seen:
            seen.add(key)
            num_bytes += storage.nbytes()
    return num_bytes


def _tensors(value: object) -> Iterator[Tensor]:
    """Walk containers down to the tensors in them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors(key)
            yield from _tensors(entry)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for entry in value:
            yield from _tensors(entry)
