"""Say which rank went another way, when a communication between ranks fails or times out.

Each rank notes what it is about to do. When a wait fails, all ranks leave their note in the store
of their process group and read those of the others: if the notes differ, the error names them.
"""

from __future__ import annotations

import datetime
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from shardwise.errors import DivergenceError, ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Generator

    from shardwise.runtime.topology import Axis

_PATIENCE = datetime.timedelta(seconds=10)
"""How long a failed rank waits for the note of another: that one fails soon after it."""


class Whereabouts:
    """What this rank is about to do, and the way to tell it to the others of one axis."""

    def __init__(self, axis: Axis) -> None:
        """Know the ranks that must meet."""
        self._axis = axis
        self.step = 0
        """Completed steps."""
        self._count = 0
        self._what = "start"

    def note(self, what: str) -> None:
        """Say what comes next."""
        self._what = what
        self._count += 1

    def exchange(self) -> dict[int, str | None]:
        """Return every rank's note by global rank, None where none came in time."""
        group = self._axis.group
        if group is None:
            return {}
        store = _get_process_group_store(group)
        ranks = dist.get_process_group_ranks(group)
        keys = {rank: f"shardwise/{self._axis.lane}/{self.step}/{rank}" for rank in ranks}
        note = f"step {self.step}: {self._what} (event {self._count})"
        # a rank that is a step behind or ahead looks under another key: leave the note at both
        for step in range(max(0, self.step - 1), self.step + 2):
            key = f"shardwise/{self._axis.lane}/{step}/{dist.get_rank()}"
            store.set(key, json.dumps(note))
        notes: dict[int, str | None] = {}
        for rank, key in keys.items():
            try:
                store.wait([key], _PATIENCE)
                notes[rank] = json.loads(store.get(key))
            except RuntimeError:
                notes[rank] = None
        return notes


@contextmanager
def explain(whereabouts: Whereabouts) -> Generator[None]:
    """Turn a failed communication inside into a ``DivergenceError`` if ranks went other ways."""
    try:
        yield
    except ShardwiseError:
        raise
    except RuntimeError as error:
        notes = whereabouts.exchange()
        if len(set(notes.values())) <= 1:
            raise
        lines = "; ".join(
            f"rank {rank} {'gave no answer' if note is None else f'was at {note}'}"
            for rank, note in notes.items()
        )
        raise DivergenceError(
            mismatch(
                "all ranks",
                expected="the same sequence of communication",
                got=lines,
                fix="call the same modules in the same order on every rank (a unit that some "
                "ranks skip must lie inside a larger unit)",
            )
        ) from error
