"""Give every rank the slices that the others have updated, and wait only where they are needed.

After ``publish`` a chunk's parameters are in flight. Where the model is known, each of them is
made absent until it is first used: an operator that takes it waits for its chunk, whatever module,
tied weight or custom method the use comes from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.runtime.absent import hide, show
from shardwise.runtime.collectives import Channel, start_all_gather

if TYPE_CHECKING:
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.topology import Axis


def settle_chunk(chunk: Chunk) -> None:
    """Wait for one chunk; the values are new, so graphs that saved the old ones become invalid."""
    chunk.await_parameters()
    parameters = [record.parameter for record in chunk.records]
    for parameter in parameters:
        show(parameter)
    torch.autograd.graph.increment_version(parameters)
    for record in chunk.records:
        record.seen_version = record.parameter._version


def publish(chunk: Chunk, axis: Axis, *, lazily: bool) -> None:
    """Start to gather a chunk that this rank has updated its slice of.

    Collectives: one all-gather, started here; all ranks publish the same chunks in the same order.

    Args:
        chunk: Its working slice holds the new values.
        axis: The shard axis.
        lazily: Let the first use of a parameter wait. Otherwise the caller calls ``settle_chunk``.
    """
    chunk.pending = start_all_gather(
        chunk.whole_C, axis, Channel.GATHER_PARAMETERS, key=chunk.index
    )
    if not chunk.pending:
        settle_chunk(chunk)
        return
    if lazily:
        for record in chunk.records:
            hide(record.parameter)
