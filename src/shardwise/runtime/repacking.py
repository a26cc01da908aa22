"""Pack an engine's parameters again, for an optimizer that needs other cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.errors import ShardwiseError, mismatch
from shardwise.runtime.build import read_parameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

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
    masters: dict[ManagedParameter, torch.Tensor] = {}
    for chunk in engine.chunks:
        if chunk.own.has_exact_master:
            master_C = engine.gather_update(chunk)
            masters |= {record: record.view_in(master_C).clone() for record in chunk.records}
    before, reducer, residence = engine.chunks, engine.reducer, engine.residence
    by_record = {r: atoms[r.parameter] for r in engine.records if r.parameter in atoms}
    read = read_parameter if engine.residence is None else engine.residence.read
    engine.pack(by_record, read, is_repacking=True)
    reducer.close()
    if residence is not None:
        residence.gatherer.close()
    for chunk in before:
        chunk.own.close()
    if engine.adaptation is not None:
        engine.adaptation.begin(engine)  # without what was there before
    with torch.no_grad():
        for record, master in masters.items():
            engine.values.write_master(record, master)
