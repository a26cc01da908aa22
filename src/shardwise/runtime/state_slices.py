"""The state of one chunk that has a home in some tier: flat slices [S] by name.

In memory a slice is *at hand* always: operators work on it where it lies. On disk it is at hand
inside ``at_hand`` only, in host memory that exists as long as that; what it holds is then written
back.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise.errors import BudgetError
from shardwise.runtime.mover import Write
from shardwise.tiers import Lane

if TYPE_CHECKING:
    from collections.abc import Generator

    from shardwise.runtime.mover import Mover
    from shardwise.tiers import Block, Tier, Transfer

logger = logging.getLogger(__name__)

MASTER = "master"
WORKING = "working"


@dataclass(slots=True)
class _Slice:
    """One slice: where it rests, and its copy in host memory while there is one."""

    home: Block
    near: Block | None = None
    reading: Transfer | None = None
    is_written: bool = False
    is_kept: bool = False
    """A write failed: only ``near`` has the values, until the next update is written."""

    @property
    def has_values(self) -> bool:
        """Whether somebody has set values, as far as a slice on disk can tell."""
        return self.is_written or self.is_kept

    @property
    def source(self) -> Block:
        """The block that has the values."""
        return _near(self) if self.is_kept else self.home


class StateSlices:
    """Named slices of one chunk that come to hand, and are put away, together."""

    def __init__(self, mover: Mover, home: Tier, numel: int) -> None:
        """Hold nothing yet.

        Args:
            mover: Carries them.
            home: Where they rest.
            numel: Elements of every slice.
        """
        self._mover = mover
        self._home = home
        self._numel = numel
        self._slices: dict[str, _Slice] = {}
        self._depth = 0
        self._is_changed = False
        self._gradient: Block | None = None

    @property
    def is_in_memory(self) -> bool:
        """Operators can use the slices where they rest."""
        return self._home.lane is Lane.MEMORY

    @property
    def is_on_accelerator(self) -> bool:
        """They rest where forward runs, and are updated there."""
        return self._home is self._mover.tiers.accelerator

    @property
    def home(self) -> Tier:
        """Where they rest."""
        return self._home

    @property
    def holds_gradient(self) -> bool:
        """A reduced gradient is held in host memory."""
        return self._gradient is not None

    @property
    def device(self) -> torch.device:
        """Where operators see the slices."""
        return (self._home if self.is_in_memory else self._mover.tiers.host).device

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return what there is by name, wherever it is."""
        return {name: entry.home.dtype for name, entry in self._slices.items()}

    @property
    def is_at_hand(self) -> bool:
        """The slices may be read and written now."""
        return self.is_in_memory or self._depth > 0

    def __contains__(self, name: str) -> bool:
        return name in self._slices

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a slice that is at hand."""
        assert self.is_at_hand, f"{name} is on disk"
        entry = self._slices[name]
        return (entry.home if self.is_in_memory else _near(entry)).tensor

    def get(self, name: str) -> torch.Tensor | None:
        """Return a slice that is at hand, None where there is none of that name."""
        return self[name] if name in self._slices else None

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a slice, wherever it is."""
        return self._slices[name].home.dtype

    def add(self, name: str, dtype: torch.dtype) -> None:
        """Make a slice of zeros.

        Raises:
            BudgetError: It does not fit; nothing was changed.
        """
        assert name not in self._slices
        entry = _Slice(self._mover.allocate(self._home, self._numel, dtype))
        self._slices[name] = entry
        if self.is_in_memory:
            entry.home.tensor.zero_()
        elif self._depth:
            try:
                self._bring(entry)
            except BudgetError:
                _free(self._slices.pop(name))
                raise

    def remove(self, name: str) -> None:
        """Give the room of a slice back, if there is one of that name."""
        entry = self._slices.pop(name, None)
        if entry is None or entry.home.is_freed:
            return
        assert not self._depth
        self._settle()
        _free(entry)

    @property
    def far_bytes(self) -> int:
        """Host memory that it takes to bring everything to hand."""
        if self.is_in_memory:
            return 0
        host = self._mover.tiers.host
        far = [entry.home for entry in self._slices.values() if entry.near is None]
        return sum(host.footprint_bytes(home.numel, home.dtype) for home in far)

    def prefetch(self) -> None:
        """Start to bring the slices to hand."""
        if self.is_in_memory:
            return
        for entry in self._slices.values():
            if entry.near is None and entry.is_written:
                entry.near, entry.reading = self._mover.fetch(entry.home)

    def forget_reads(self) -> None:
        """Let go of what was read ahead and is not at hand."""
        if self.is_at_hand:
            return
        for entry in self._slices.values():
            near, reading = entry.near, entry.reading
            if near is not None and not entry.is_kept:
                entry.near, entry.reading = None, None
                if reading is not None:
                    reading.settle()
                near.tier.free(near)

    @contextmanager
    def at_hand(self, *, is_changed: bool = True) -> Generator[None]:
        """Inside, all slices may be read, and written if ``is_changed``. Contexts nest."""
        if self.is_in_memory:
            yield
            return
        self.prefetch()
        self._depth += 1
        try:
            for entry in self._slices.values():
                self._bring(entry)
            self._is_changed |= is_changed
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._put_away()

    def _bring(self, entry: _Slice) -> None:
        """Return when one slice is in host memory."""
        if entry.near is None:
            entry.near = self._mover.take_near(entry.home)
            entry.near.tensor.zero_()
        if entry.reading is not None:
            entry.reading.wait()  # an error leaves it to be put away unread
            entry.reading = None

    def _put_away(self) -> None:
        """Write what may have changed, and let go of host memory."""
        is_changed, self._is_changed = self._is_changed, False
        writes: list[Write] = []
        for entry in self._slices.values():
            near, entry.near = entry.near, None
            if near is None:
                continue
            if entry.reading is not None:
                reading, entry.reading = entry.reading, None
                reading.settle()
                near.tier.free(near)
            elif entry.is_kept and not is_changed:
                entry.near = near  # whoever only reads, as to save a checkpoint, can still do so
            elif is_changed or not entry.is_written:
                entry.is_written, entry.is_kept = True, False
                writes.append(Write(near, entry.home, partial(_take_back, entry)))
            else:
                near.tier.free(near)
        self._mover.write_back(writes)

    def _settle(self) -> None:
        """Let writes run out before something is freed that they may read or write.

        An error of one costs nothing: its values are in host memory, and are written another time.
        """
        try:
            self._mover.settle()
        except Exception:
            logger.warning("a write to disk failed and will be repeated", exc_info=True)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return what is held, by tier, for accounting; what is on disk as meta tensors."""
        if self.is_on_accelerator:
            return self._tensors_on_accelerator()
        entries = self._slices.values()
        blocks = [b for e in entries for b in (e.home, e.near) if b is not None]
        held: dict[str, list[torch.Tensor]] = {"host": [], "disk": []}
        for block in blocks:
            is_on_host = block.tier is self._mover.tiers.host
            meta = torch.empty(block.numel, dtype=block.dtype, device="meta")
            held["host" if is_on_host else "disk"].append(block.tensor if is_on_host else meta)
        if self._gradient is not None:
            held["host"].append(self._gradient.tensor)
        return held

    def _tensors_on_accelerator(self) -> dict[str, list[torch.Tensor]]:
        """Return what is held there, by purpose."""
        held: dict[str, list[torch.Tensor]] = {}
        purposes = {WORKING: "parameters", MASTER: "masters"}
        for name, entry in self._slices.items():
            held.setdefault(purposes.get(name, "optimizer_state"), []).append(entry.home.tensor)
        return held

    def move(self, home: Tier) -> None:
        """Rest in another tier from now on; views of slices in memory are void.

        Raises:
            BudgetError: There is no room; nothing was changed.
        """
        assert not self._depth
        if home is self._home:
            return
        self._mover.settle()
        moved: dict[str, _Slice] = {}
        try:
            for name, entry in self._slices.items():
                block = self._mover.allocate(home, self._numel, entry.home.dtype)
                moved[name] = _Slice(block, is_written=self.is_in_memory or entry.has_values)
            self._mover.carry(
                [
                    (self._slices[name].source, entry.home)
                    for name, entry in moved.items()
                    if entry.is_written
                ]
            )
        except BaseException:
            for entry in moved.values():
                _free(entry)
            raise
        before, self._slices, self._home = self._slices, moved, home
        for entry in before.values():
            _free(entry)
        for entry in moved.values():
            if self.is_in_memory and not entry.is_written:
                entry.home.tensor.zero_()

    # ------------------------------------------------------------------ gradients

    def take_gradient(self, mean_S: torch.Tensor) -> torch.Tensor:
        """Copy a reduced gradient to host memory, or add it to what is there; return that."""
        if self._gradient is None:
            self._gradient = self._mover.allocate(self._mover.tiers.host, self._numel, mean_S.dtype)
            self._gradient.tensor.copy_(mean_S)
        else:
            total_S = self._gradient.tensor
            total_S.add_(mean_S.to(total_S.device))
        return self._gradient.tensor

    def drop_gradient(self) -> None:
        """Give the gradient's memory back."""
        gradient, self._gradient = self._gradient, None
        if gradient is not None:
            gradient.tier.free(gradient)

    def close(self) -> None:
        """Give all memory back: the chunk is no more."""
        assert not self._depth
        self._settle()
        self.drop_gradient()
        for entry in self._slices.values():
            _free(entry)
        self._slices = {}


def _take_back(entry: _Slice, near: Block) -> None:
    """Keep values that could not be written: they are at hand next time, and written then."""
    if entry.home.is_freed:
        near.tier.free(near)
        return
    unread, entry.near = entry.near, near
    reading, entry.reading = entry.reading, None
    entry.is_written, entry.is_kept = False, True
    if reading is not None:
        reading.settle()
    if unread is not None:
        unread.tier.free(unread)


def _free(entry: _Slice) -> None:
    """Give the memory of one slice back, also of a read that nobody waited for."""
    if entry.reading is not None:
        entry.reading.settle()
    for block in (entry.near, entry.home):
        if block is not None:
            block.tier.free(block)


def _near(entry: _Slice) -> Block:
    """Return the copy in host memory."""
    assert entry.near is not None
    return entry.near
