"""Stage 3 put together for one engine: gathering, saved views and unit calls.

It answers the questions that the rest of the engine has: is something running that may use
parameters, bring this one, give me its value, let everything rest.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import ShardwiseError, mismatch
from shardwise.runtime import refusals
from shardwise.runtime.gatherer import OUTSIDE_BACKWARD, Gatherer
from shardwise.runtime.handles import SavedViews
from shardwise.runtime.units import UnitCalls
from shardwise.runtime.whole_state import WholeState

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from torch import nn

    from shardwise.runtime.engine import Engine
    from shardwise.runtime.managed import ManagedParameter
    from shardwise.runtime.units import Unit


class Residence:
    """Where whole parameters are, for the chunks of one engine."""

    def __init__(self, engine: Engine, before: Residence | None) -> None:
        """Serve the chunks that the engine has now.

        Args:
            engine: Its chunks are released.
            before: The residence of earlier chunks, whose hooks on modules are kept.
        """
        options = engine.options
        self.whereabouts = engine.whereabouts
        self.gatherer = Gatherer(
            engine.chunks,
            whereabouts=engine.whereabouts,
            pool=engine.pool,
            recorder=engine.recorder,
            keep_bytes=options.keep_bytes,
            prefetch_bytes=0 if engine.has_limit else options.prefetch_bytes,
        )
        views = SavedViews(self.gatherer, engine.meter)
        if before is None:
            self.calls = UnitCalls(engine, self.gatherer, views)
            self.state = WholeState(self)
        else:
            self.calls, self.state = before.calls, before.state
            self.calls.serve(self.gatherer, views)
            self.state.serve(self)

    @property
    def is_computing(self) -> bool:
        """True while something runs that may use parameters."""
        in_backward = torch._C._current_graph_task_id() != OUTSIDE_BACKWARD
        return in_backward or self.calls.is_running

    def attach(self, module: nn.Module, units: Iterable[Unit]) -> None:
        """Watch the calls of a module and its units, and its state dicts."""
        self.calls.attach(module, units)
        self.state.attach(module)

    def bring(self, record: ManagedParameter, func: Callable[..., Any]) -> None:
        """Gather the chunk of an absent parameter, or refuse outside of forward and backward."""
        if not self.is_computing and not self.state.is_reading:
            raise refusals.absent_values(record, func)
        self.gatherer.fetch(record.chunk)

    def read(self, record: ManagedParameter) -> torch.Tensor:
        """Return the whole value of a parameter. Collectives: an all-gather if it is not there."""
        self.gatherer.fetch(record.chunk)
        return record.view_in(record.chunk.whole_C)

    @contextmanager
    def whole(self, records: Iterable[ManagedParameter]) -> Generator[None]:
        """Inside, the chunks of some records are whole. Collectives: an all-gather each."""
        chunks = list(dict.fromkeys(record.chunk for record in records))
        self.gatherer.pin(chunks)
        try:
            yield
        finally:
            self.gatherer.unpin(chunks)
            self.rest()

    def prepare_update(self) -> None:
        """Release everything before a step, since an update makes whole values old.

        Raises:
            ShardwiseError: Inside ``full_parameters``.
        """
        self.calls.unwind()
        if self.gatherer.has_pins:
            raise ShardwiseError(
                mismatch(
                    "step",
                    expected="a call outside full_parameters",
                    got="one inside",
                    fix="leave full_parameters() first",
                )
            )
        self.gatherer.release_all()

    def recover(self) -> None:
        """Return to rest, also after a forward pass that was interrupted."""
        self.calls.unwind()
        self.rest()

    def rest(self) -> None:
        """Release everything that nothing running needs, unless it is kept until a step."""
        if not self.is_computing:
            self.gatherer.end_backward()
