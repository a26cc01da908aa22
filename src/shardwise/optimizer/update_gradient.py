"""The gradient that an update sees: scaled, and in the update's dtype; the stored one stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.own_slices import OwnSlices


class Factors:
    """What stored gradients are divided and multiplied by before the update."""

    def __init__(self, divisors: dict[Engine, float], clip: float) -> None:
        """Divide by the engine's loss scale times weight, then multiply by the clip coefficient."""
        self._divisors = divisors
        self._clip = clip

    def are_neutral(self, engine: Engine) -> bool:
        """Return whether stored gradients are used as they are."""
        return self._divisors[engine] == 1.0 and self._clip == 1.0

    def apply_(self, gradient: torch.Tensor, engine: Engine) -> torch.Tensor:
        """Scale a gradient in place."""
        if self._divisors[engine] != 1.0:
            gradient.div_(self._divisors[engine])
        if self._clip != 1.0:
            gradient.mul_(self._clip)
        return gradient


class Buffers(Protocol):
    """Where a gradient that cannot be used as it is stored is made."""

    def take(self, numel: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised elements on the device of ``like``."""
        ...


class NewMemory:
    """Buffers that live as long as they are used."""

    def take(self, numel: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Allocate."""
        return torch.empty(numel, dtype=dtype, device=like.device)


class OneTile:
    """One buffer a dtype, used anew for every tile: it stays in the cache, and its pages are there.

    Fresh memory costs more than the pass that fills it: the system clears every page first.
    """

    def __init__(self, numel: int) -> None:
        """Hold nothing yet; no request is for more than ``numel`` elements."""
        self._numel = numel
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}

    def take(self, numel: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the start of the buffer of that dtype; what was taken before is void."""
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = torch.empty(self._numel, dtype=dtype, device=like.device)
        return self._by_dtype[dtype][:numel]


def needs_copy(own: OwnSlices, engine: Engine, factors: Factors) -> bool:
    """Return whether the stored gradient of a chunk is not what the update takes."""
    assert own.gradient_S is not None
    return own.gradient_S.dtype != own.update_dtype or not factors.are_neutral(engine)


def read_gradient(
    own: OwnSlices, engine: Engine, factors: Factors, elements: slice, buffers: Buffers
) -> torch.Tensor:
    """Return some elements of a slice's gradient for the update."""
    assert own.gradient_S is not None
    stored, target = own.gradient_S[elements], own.update_S
    if not needs_copy(own, engine, factors):
        return stored.to(target.device)  # stage 1: the gradient lies in the whole buffer
    is_scaled = not factors.are_neutral(engine)
    # 16-bit updates are scaled in float32 too: a small factor would underflow before it
    dtype = torch.promote_types(target.dtype, torch.float32) if is_scaled else target.dtype
    gradient = buffers.take(stored.numel(), target, dtype).copy_(stored)
    if is_scaled:
        factors.apply_(gradient, engine)
    if dtype == target.dtype:
        return gradient
    return buffers.take(stored.numel(), target, target.dtype).copy_(gradient)
