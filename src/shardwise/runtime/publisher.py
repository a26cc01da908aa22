"""Give every rank the slices that the others have updated, and wait only where they are needed.

After ``publish`` a chunk's parameters are in flight: graphs that saved them are void at once. Where
the model is known, each of them is made absent until it is first used: an operator that takes it
waits for its chunk, whatever module, tied weight or custom method the use comes from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runtime.absent import hide, show
from shardwise.runtime.collectives import Channel, start_all_gather

if TYPE_CHECKING:
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.topology import Axis


def settle_chunk(chunk: Chunk) -> None:
    """Wait for one chunk and make its parameters plain."""
    chunk.await_parameters()
    for record in chunk.records:
        show(record.parameter)


def publish(chunk: Chunk, axis: Axis, *, lazily: bool) -> None:
    """Start to gather a chunk that this rank has updated its slice of.

    Collectives: one all-gather, started here; all ranks publish the same chunks in the same order.

    Args:
        chunk: Its working slice holds the new values.
        axis: The shard axis.
        lazily: Let the first use of a parameter wait. Otherwise the caller calls ``settle_chunk``.
    """
    # before anything arrives: backward over an older graph does not wait for it
    chunk.void_graphs()
    chunk.pending = start_all_gather(
        chunk.whole_C, axis, Channel.GATHER_PARAMETERS, key=chunk.index
    )
    if not chunk.pending:
        settle_chunk(chunk)
        return
    if lazily:
        for record in chunk.records:
            hide(record.parameter)
