"""Page-locked host memory of exact size, reused by size.

torch's own allocator of page-locked memory rounds up to a power of two, which would waste up to
half of the host; so pages are mapped and registered with the device here. Registering is slow and
stops the device, therefore freed memory is kept for the next block of the same size - never more,
in use and kept together, than was in use at the peak, so a budget on what is in use holds for all.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from shardwise.tiers.pages import PAGE_BYTES, map_pages, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.tiers.block import Arrival


class Registrar(Protocol):
    """Makes mapped pages known to a device, so that it copies them by itself."""

    def register(self, memory: torch.Tensor) -> None:
        """Lock the pages of ``memory``."""
        ...

    def unregister(self, memory: torch.Tensor) -> None:
        """Unlock them; the device must be done with them."""
        ...


class CudaRegistrar:
    """Registers with the CUDA runtime."""

    def register(self, memory: torch.Tensor) -> None:
        """Lock the pages for every device of the process (flag 1 is portable)."""
        cudart: Any = torch.cuda.cudart()  # a module that torch has no type for
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 1))

    def unregister(self, memory: torch.Tensor) -> None:
        """Unlock the pages."""
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostUnregister(memory.data_ptr()))


class _Kept(NamedTuple):
    """Registered memory without an owner, which a device may still be copying."""

    memory: torch.Tensor
    arrivals: tuple[Arrival, ...]


class PinnedMemory:
    """Hands out registered pages and takes them back without making the host wait."""

    def __init__(self, registrar: Registrar) -> None:
        """Register nothing yet."""
        self._registrar = registrar
        self._lock = threading.Lock()
        self._in_use: dict[int, torch.Tensor] = {}
        self._kept: list[_Kept] = []
        self._in_use_bytes = 0
        self._peak_bytes = 0

    @property
    def registered_bytes(self) -> int:
        """Bytes in use and kept for reuse."""
        return self._in_use_bytes + sum(kept.memory.numel() for kept in self._kept)

    def round_up(self, num_bytes: int) -> int:
        """Return the bytes of the pages that ``num_bytes`` take."""
        return round_up(num_bytes, PAGE_BYTES)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return registered pages, uint8; waits only for copies of memory that it reuses."""
        need_bytes = self.round_up(num_bytes)
        with self._lock:
            in_use_bytes = self._in_use_bytes + need_bytes
            peak_bytes = max(self._peak_bytes, in_use_bytes)
            memory = self._reuse(need_bytes)
            if memory is None:
                self._drop_kept(peak_bytes - in_use_bytes)
                memory = map_pages(need_bytes).tensor
                self._registrar.register(memory)
            self._in_use[memory.data_ptr()] = memory
            self._in_use_bytes, self._peak_bytes = in_use_bytes, peak_bytes
        return memory

    def give_back(self, tensor: torch.Tensor, arrivals: Sequence[Arrival]) -> None:
        """Keep memory, known by its first byte, for reuse after ``arrivals``."""
        with self._lock:
            memory = self._in_use.pop(tensor.data_ptr())
            self._in_use_bytes -= memory.numel()
            self._kept.append(_Kept(memory, tuple(arrivals)))

    def close(self) -> None:
        """Unregister everything that is not in use."""
        with self._lock:
            self._drop_kept(0)

    def _reuse(self, need_bytes: int) -> torch.Tensor | None:
        """Take kept memory of exactly that size, of what is ready else of the oldest."""
        matches = [kept for kept in self._kept if kept.memory.numel() == need_bytes]
        if not matches:
            return None
        ready = [kept for kept in matches if all(arrival.query() for arrival in kept.arrivals)]
        chosen = (ready or matches)[0]
        for arrival in chosen.arrivals:
            arrival.synchronize()
        self._kept = [kept for kept in self._kept if kept is not chosen]
        return chosen.memory

    def _drop_kept(self, limit_bytes: int) -> None:
        """Unregister the oldest of what is kept until at most ``limit_bytes`` are."""
        kept_bytes = sum(kept.memory.numel() for kept in self._kept)
        while kept_bytes > limit_bytes:
            oldest = self._kept.pop(0)
            for arrival in oldest.arrivals:
                arrival.synchronize()
            self._registrar.unregister(oldest.memory)
            kept_bytes -= oldest.memory.numel()
