"""``copy(source, target)`` between any two blocks, whatever their tiers.

Copies behave as if each ran at once, in the order of the calls: one that reads what an earlier one
writes, or writes what an earlier one reads or writes, runs after it. All others run side by side.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ConfigurationError, ShardwiseError, mismatch
from shardwise.tiers.memory import as_bytes
from shardwise.tiers.tier import Lane
from shardwise.tiers.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.tiers.block import Arrival, Block
    from shardwise.tiers.streams import Streams
    from shardwise.tiers.transfer import Scheduler


class Copier:
    """Starts all copies of one process: the order of its calls is the order of effects."""

    def __init__(self, scheduler: Scheduler, *, streams: Streams | None = None) -> None:
        """Copy with ``scheduler``; ``streams`` are those of the accelerator, None without one."""
        self._scheduler = scheduler
        self._streams = streams
        self._lock = threading.Lock()

    def copy(self, source: Block, target: Block) -> Transfer:
        """Start a copy and return its handle.

        Args:
            source: Must not be written before the copy was waited for.
            target: Another block of as many elements of the same dtype; undefined until then.

        Raises:
            ConfigurationError: The blocks do not match. Dtypes are not converted here: the same
                bytes arrive that were sent.
            ShardwiseError: A block was freed, or the tiers are closed.
        """
        _check_match(source, target)
        with self._lock:
            transfer = self._describe(source, target)
            after = transfer.begin()
            try:
                self._scheduler.submit(transfer, after)
            except ShardwiseError:
                source.finish(transfer, None)
                target.finish(transfer, None)
                raise
        return transfer

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Run what is left and take nothing more, then call ``then``; see ``Scheduler.close``."""
        self._scheduler.close(then)

    def _describe(self, source: Block, target: Block) -> Transfer:
        """Choose how the bytes travel."""
        is_on_host = source.tier.device.type == target.tier.device.type == "cpu"
        is_in_file = Lane.FILE in (source.tier.lane, target.tier.lane)
        lane: Lane | None = Lane.FILE if is_in_file else Lane.MEMORY
        streams = self._streams
        if is_on_host or streams is None:
            job = partial(_copy_on_host, source, target)
        elif is_in_file:
            job = partial(_copy_through_host, source, target, streams, streams.mark())
        else:
            job = partial(_copy_on_stream, source, target, streams, streams.mark())
            lane = None
        return Transfer(source, target, job=job, scheduler=self._scheduler, lane=lane)


def _copy_on_host(source: Block, target: Block, after: Sequence[Transfer]) -> None:
    """Move bytes with the calling thread."""
    for arrival in _arrivals(source, target, after):
        arrival.synchronize()
    is_in_memory = target.tier.lane is Lane.MEMORY
    place = as_bytes(target.tensor) if is_in_memory else None
    with torch.no_grad(), source.tier.open_pieces(source, place) as pieces:
        target.tier.write_pieces(target, pieces)


def _copy_through_host(
    source: Block,
    target: Block,
    streams: Streams,
    ready: torch.Event,
    after: Sequence[Transfer],
) -> None:
    """Move bytes between the device and a file with the calling thread."""
    for arrival in (ready, *_arrivals(source, target, after)):
        arrival.synchronize()
    with torch.no_grad():
        streams.copy_through_host(source, target)


def _copy_on_stream(
    source: Block,
    target: Block,
    streams: Streams,
    ready: torch.Event,
    after: Sequence[Transfer],
) -> Arrival:
    """Queue a copy on a side stream."""
    with torch.no_grad():
        return streams.copy(source, target, after=(ready, *_arrivals(source, target, after)))


def _arrivals(source: Block, target: Block, after: Sequence[Transfer]) -> list[Arrival]:
    """Return what a device has not surely done of the copies before."""
    arrivals = [*source.arrivals(), *target.arrivals()]
    return arrivals + [earlier.arrival for earlier in after if earlier.arrival is not None]


def _check_match(source: Block, target: Block) -> None:
    """Refuse what could not be a copy of bytes."""
    is_match = (source.numel, source.dtype) == (target.numel, target.dtype)
    if source is target or not is_match:
        raise ConfigurationError(
            mismatch(
                "copy",
                expected=f"another block like {source!r}",
                got="the block itself" if source is target else repr(target),
                fix="allocate the target with the source's numel and dtype",
            )
        )
