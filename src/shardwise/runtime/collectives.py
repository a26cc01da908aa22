"""The few collectives of the engine, in place on slices of one flat buffer.

Two ways to carry them out, chosen by the backend of the group and nowhere else:

- **pairwise** (gloo): every rank sends its slice to the others point to point. Reductions add what
  arrives in rank order, in at least float32: deterministic, and half the bytes that gloo's own
  reduce-scatter sends.
- **native** (NCCL and others): the backend's in-place all-gather and reduce-scatter.

Legend: buffer_C is a whole chunk, slice_S one rank's part, C = size * S.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from shardwise.options import HALF_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.runtime.topology import Axis, Topology


_KEYS = 2**14
"""Chunks of one engine that messages tell apart; tags have 31 bits."""

Allocate = Callable[[torch.Tensor, int], torch.Tensor]
"""Returns uninitialised memory like a tensor's, of a number of elements."""


class Channel(Enum):
    """Message streams that may be in flight together; each is ordered, none waits for another."""

    REDUCE = 1
    GATHER_GRADIENTS = 2
    GATHER_PARAMETERS = 3


class Waitable(Protocol):
    """What a started communication returns."""

    def wait(self) -> object:
        """Block until the communication has taken effect."""
        ...


def slice_of(buffer_C: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the view of the part of the buffer that ``rank`` owns."""
    numel = buffer_C.numel() // size
    return buffer_C.narrow(0, rank * numel, numel)


def wait_all(works: Sequence[Waitable]) -> None:
    """Wait for several communications in the order they were started."""
    for work in works:
        work.wait()


def is_pairwise(axis: Axis, device: torch.device) -> bool:
    """Return whether tensors on this device go point to point (trivially so without peers)."""
    if axis.group is None:
        return True
    return device.type == "cpu" and axis.group._get_backend(device).name() == "gloo"


def start_all_gather(
    buffer_C: torch.Tensor,
    axis: Axis,
    channel: Channel,
    *,
    key: int = 0,
    own_S: torch.Tensor | None = None,
) -> list[Waitable]:
    """Start to fill every rank's buffer with all slices, each taken from its owner.

    Args:
        buffer_C: Filled when the communication has ended.
        axis: The ranks.
        channel: Message stream.
        key: Number of the chunk: messages of different chunks are never taken for each other.
        own_S: The rank's own slice where it does not lie in the buffer yet.

    Collectives: one all-gather, C * (size - 1) / size elements sent in total by each rank.
    """
    place_S = slice_of(buffer_C, axis.rank, axis.size)
    if axis.group is None or buffer_C.numel() == 0:
        if own_S is not None:
            place_S.copy_(own_S)
        return []
    if not is_pairwise(axis, buffer_C.device):
        source_S = place_S if own_S is None else own_S
        group = axis.gathers if channel is Channel.GATHER_PARAMETERS else None
        work = dist.all_gather_single(buffer_C, source_S, group=group or axis.group, async_op=True)
        return [work] if work is not None else []
    works: list[Waitable] = []
    for peer in axis.peers:
        theirs_S = slice_of(buffer_C, peer, axis.size)
        tag = _tag(axis, channel, key)
        works += _swap(place_S if own_S is None else own_S, theirs_S, peer, axis, tag)
    if own_S is not None:
        place_S.copy_(own_S)
    return works


class ReduceScatter:
    """A started sum over an axis: begun in the constructor, ended by ``finish``.

    The buffer must stay untouched until ``finish``; afterwards it is free for reuse. Received
    slices lie in memory that ``allocate`` gives; ``finish`` leaves them in ``received`` for reuse.
    Collectives: one reduce-scatter, C * (size - 1) / size elements sent by each rank.
    """

    def __init__(
        self,
        buffer_C: torch.Tensor,
        axis: Axis,
        allocate: Allocate = torch.Tensor.new_empty,
        *,
        key: int = 0,
    ) -> None:
        """Start to exchange slices of ``buffer_C``, the chunk with the number ``key``."""
        self.own_S = slice_of(buffer_C, axis.rank, axis.size)
        self.received: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = [self.own_S]
        self._works: list[Waitable] = []
        if axis.group is None or buffer_C.numel() == 0:
            return
        if not is_pairwise(axis, buffer_C.device):
            work = dist.reduce_scatter_single(self.own_S, buffer_C, group=axis.group, async_op=True)
            self._works = [work] if work is not None else []
            return
        for peer in axis.peers:
            part = allocate(buffer_C, self.own_S.numel())
            theirs_S = slice_of(buffer_C, peer, axis.size)
            self._works += _swap(theirs_S, part, peer, axis, _tag(axis, Channel.REDUCE, key))
            self.received.append(part)
        self._parts = [*self.received]
        self._parts.insert(axis.rank, self.own_S)
        if buffer_C.dtype in HALF_DTYPES:
            wide = buffer_C.new_empty(0, dtype=torch.float32)
            self.received.append(allocate(wide, self.own_S.numel()))

    def wait(self) -> None:
        """Wait until the exchange is over, and leave what came where it is."""
        wait_all(self._works)

    def finish(self) -> torch.Tensor:
        """Wait, add in rank order and return the sum, [S].

        The sum is in at least float32 where ranks were added. It lies in a tensor of ``received``,
        or in the rank's own slice where nothing was received.
        """
        wait_all(self._works)
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            return parts[0]
        if parts[0].dtype in HALF_DTYPES:
            total_S = self.received[-1].copy_(parts[0])
            for part in parts[1:]:
                total_S.add_(part)
            return total_S
        # the own slice may be unread until the last addition: sum into received memory
        total_S = torch.add(parts[0], parts[1], out=self.received[0])
        for part in parts[2:]:
            total_S.add_(part)
        return total_S


def all_reduce_in_rank_order(
    buffer_C: torch.Tensor, axis: Axis, *, divisor: int, key: int = 0
) -> None:
    """Replace the buffer by its sum over the axis divided by ``divisor``.

    The division comes before the sum is rounded to a 16-bit buffer, so it cannot overflow there.
    Collectives: one reduce-scatter and one all-gather; the buffer's numel must be a multiple of the
    axis size.
    """
    exchange = ReduceScatter(buffer_C, axis, key=key)
    total_S = exchange.finish()
    if divisor != 1:
        total_S.div_(divisor)
    if total_S is not exchange.own_S:
        exchange.own_S.copy_(total_S)
    wait_all(start_all_gather(buffer_C, axis, Channel.GATHER_GRADIENTS, key=key))


def broadcast_from_first(tensor: torch.Tensor, topology: Topology) -> None:
    """Give every rank the first rank's values, in place."""
    for axis in (topology.replicate, topology.shard):
        if axis.group is not None and tensor.numel():
            dist.broadcast(tensor, group=axis.group, group_src=0)


def all_reduce_scalars(
    values: torch.Tensor, axes: Sequence[Axis], *, maximum: bool = False
) -> torch.Tensor:
    """Sum (or take the maximum of) a few numbers over the axes, in place, and return them.

    Numbers on the CPU travel by the control group, apart from collectives of other devices.
    """
    op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    for axis in axes:
        if axis.group is not None:
            group = axis.control if values.device.type == "cpu" else axis.group
            dist.all_reduce(values, op=op, group=group)
    return values


def _swap(
    outgoing: torch.Tensor, incoming: torch.Tensor, peer: int, axis: Axis, tag: int
) -> list[Waitable]:
    """Start to receive from and send to one peer."""
    received = dist.irecv(incoming, group=axis.group, group_src=peer, tag=tag)
    sent = dist.isend(outgoing, group=axis.group, group_dst=peer, tag=tag)
    return [work for work in (received, sent) if work is not None]


def _tag(axis: Axis, channel: Channel, key: int) -> int:
    """Return what sets a message apart from all others that may be under way on the group."""
    return (channel.value + len(Channel) * axis.lane) * _KEYS + key % _KEYS
