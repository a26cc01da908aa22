"""Pack an engine's parameters again, for an optimizer that needs other cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.errors import ShardwiseError, mismatch
from shardwise.runtime.build import read_parameter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from shardwise.layout import Slot
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.managed import ManagedParameter


def repack(engine: Engine, atoms: Mapping[nn.Parameter, int]) -> None:
    """Pack again with other atoms, before any gradient or optimizer state exists.

    Exact masters move along. Collectives: a broadcast per chunk and axis, and an all-gather of
    the masters.
    """
    has_gradients = engine.reducer.is_open or any(record.is_held for record in engine.records)
    if has_gradients or engine.was_updated:
        raise ShardwiseError(
            mismatch(
                "an optimizer that needs whole parameters",
                expected="a model that was not trained since it was sharded",
                got="gradients" if has_gradients else "updates of an earlier optimizer",
                fix="make the ShardedOptimizer before the first backward pass",
            )
        )
    engine.values.settle()
    before, reducer, residence = engine.chunks, engine.reducer, engine.residence
    slots = {chunk: [(record, record.slot) for record in chunk.records] for chunk in before}
    by_record = {r: atoms[r.parameter] for r in engine.records if r.parameter in atoms}
    read = read_parameter if engine.residence is None else engine.residence.read
    engine.pack(by_record, read, is_repacking=True)
    reducer.close()
    if residence is not None:
        residence.gatherer.close()
    for chunk in before:
        if chunk.own.has_exact_master:
            _move_masters(engine, chunk, slots[chunk])
        chunk.own.close()
    if engine.adaptation is not None:
        engine.adaptation.begin(engine)  # without what was there before


@torch.no_grad()
def _move_masters(
    engine: Engine, chunk: Chunk, slots: Sequence[tuple[ManagedParameter, Slot]]
) -> None:
    """Give parameters the masters that they had in an earlier chunk, at their earlier places.

    Memory: that chunk, whole in float32. Collectives: one all-gather.
    """
    master_C = engine.gather_update(chunk)
    for record, slot in slots:
        engine.values.write_master(record, record.view_at(slot, master_C))
