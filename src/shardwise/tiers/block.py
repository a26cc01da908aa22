"""A flat run of elements in one tier, and who still needs its bytes; it moves nothing itself.

A block knows the copies that read and write it, so that a later copy runs after the ones it depends
on, and so that it cannot be freed under a copy. *Busy* means that a copy was not waited for yet,
whether or not its bytes have arrived: whether a program is right never depends on timing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardwise.errors import ShardwiseError, mismatch

if TYPE_CHECKING:
    import torch

    from shardwise.tiers.tier import Tier
    from shardwise.tiers.transfer import Transfer


class Arrival(Protocol):
    """The moment on a device stream when the bytes of a copy are there; ``torch.Event`` is one."""

    def query(self) -> bool:
        """Return whether the moment has come."""
        ...

    def synchronize(self) -> None:
        """Block the host until it has come."""
        ...

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make a stream, the current one by default, wait for it; the host goes on."""
        ...


class Remains(NamedTuple):
    """What a freed block leaves to its tier."""

    tensor: torch.Tensor | None
    arrivals: tuple[Arrival, ...]
    """Device copies that were waited for by a stream, but may still run."""


class Block:
    """``numel`` elements of one dtype in one tier.

    Made by ``Tier.allocate``, ended by ``Tier.free`` or ``Tier.close``. Holds no bytes beyond its
    tensor; hashed by identity.
    """

    __slots__ = (
        "_arrivals",
        "_is_freed",
        "_lock",
        "_readers",
        "_tensor",
        "_unwaited",
        "_writer",
        "dtype",
        "numel",
        "tier",
    )

    def __init__(
        self, tier: Tier, *, numel: int, dtype: torch.dtype, tensor: torch.Tensor | None
    ) -> None:
        """Describe what ``tier`` holds; ``tensor`` is None where no operator could use it."""
        self.tier = tier
        self.numel = numel
        self.dtype = dtype
        self._tensor = tensor
        self._lock = threading.Lock()
        self._is_freed = False
        self._writer: Transfer | None = None
        self._readers: set[Transfer] = set()
        self._unwaited: set[Transfer] = set()
        self._arrivals: list[Arrival] = []

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Block({dtype}[{self.numel}] in {self.tier.name})"

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, without what the tier adds to align them."""
        return self.numel * self.dtype.itemsize

    @property
    def is_freed(self) -> bool:
        """Whether the block was given back."""
        return self._is_freed

    @property
    def tensor(self) -> torch.Tensor:
        """The elements, 1-D, uninitialised until they are written.

        Raises:
            ShardwiseError: The block was freed, or its tier has no memory that operators can use.
        """
        tensor = self._tensor
        if tensor is None:
            self.check_alive()
            raise ShardwiseError(
                mismatch(
                    "Block.tensor",
                    expected="a block in memory",
                    got=repr(self),
                    fix="copy it to a block on host or accelerator first",
                )
            )
        return tensor

    def check_alive(self) -> None:
        """Raise unless the block may be used."""
        if self._is_freed:
            raise ShardwiseError(
                mismatch(
                    repr(self),
                    expected="a live block",
                    got="one that was freed, or whose tier was closed",
                    fix="allocate another block",
                )
            )

    def start_read(self, transfer: Transfer) -> list[Transfer]:
        """Register a copy from this block; return the copies it has to run after."""
        with self._lock:
            self.check_alive()
            before = [] if self._writer is None else [self._writer]
            self._readers.add(transfer)
            self._unwaited.add(transfer)
        return before

    def start_write(self, transfer: Transfer) -> list[Transfer]:
        """Register a copy to this block; return the copies it has to run after."""
        with self._lock:
            self.check_alive()
            before = [*self._readers, *([] if self._writer is None else [self._writer])]
            self._readers.clear()
            self._writer = transfer
            self._unwaited.add(transfer)
        return before

    @property
    def writer(self) -> Transfer | None:
        """The last copy to this block that nobody waited for yet."""
        return self._writer

    def finish(self, transfer: Transfer, arrival: Arrival | None) -> None:
        """Forget a copy that was waited for; ``arrival`` if a device may still be at it."""
        with self._lock:
            self._unwaited.discard(transfer)
            self._readers.discard(transfer)
            if self._writer is transfer:
                self._writer = None
            self._arrivals = [earlier for earlier in self._arrivals if not earlier.query()]
            if arrival is not None:
                self._arrivals.append(arrival)

    def arrivals(self) -> list[Arrival]:
        """Return the device copies that were waited for by a stream, but may still run."""
        with self._lock:
            return list(self._arrivals)

    def unwaited(self) -> list[Transfer]:
        """Return the copies that nobody waited for."""
        with self._lock:
            return list(self._unwaited)

    def retire(self, *, is_forced: bool = False) -> Remains:
        """End the block and return what it leaves.

        Args:
            is_forced: End it although copies were not waited for; the caller let them run out.

        Raises:
            ShardwiseError: It was freed before, or is busy.
        """
        with self._lock:
            self.check_alive()
            if self._unwaited and not is_forced:
                raise ShardwiseError(
                    mismatch(
                        f"free of {self!r}",
                        expected="a block without copies under way",
                        got=f"{len(self._unwaited)} that nobody waited for",
                        fix="call Transfer.wait() of each copy first",
                    )
                )
            self._is_freed = True
            remains = Remains(self._tensor, tuple(self._arrivals))
            self._tensor = None
            self._arrivals = []
        return remains
