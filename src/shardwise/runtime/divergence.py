"""Say which rank went another way, when a communication between ranks fails or times out.

Each rank notes what it is about to do. When a wait fails, all ranks leave their note in the store
of their process group and read those of the others: if the notes differ, the error names them.
"""

from __future__ import annotations

import datetime
import json
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from shardwise.errors import DivergenceError, ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.topology import Axis

NoteT = TypeVar("NoteT", str, list[str])

_POSITIVE = 2**61 - 1

_LONGEST_SEQUENCE = 2**12
"""Gathers that are remembered by name: without training nobody agrees, and nothing may pile up."""

_PATIENCE = datetime.timedelta(seconds=10)
"""How long a failed rank waits for the note of another: that one fails soon after it."""


class Whereabouts:
    """What this rank is about to do, and the way to tell it to the others of one axis."""

    def __init__(self, axis: Axis) -> None:
        """Know the ranks that must meet."""
        self.axis = axis
        self.step = 0
        """Completed steps."""
        self.gathered_print = 0
        """Differs where ranks have gathered otherwise since they last agreed."""
        self._gathered: deque[Chunk] = deque(maxlen=_LONGEST_SEQUENCE)
        self._count = 0
        self._task = self._last_task = ""
        self._what = "start"
        self._chunk: Chunk | None = None

    def note(self, what: str, chunk: Chunk | None = None) -> None:
        """Say what comes next."""
        self._what, self._chunk = what, chunk
        self._count += 1

    @contextmanager
    def during(self, task: str) -> Generator[None]:
        """Name the call of the user that what comes inside belongs to."""
        before = self._task
        self.begin(task)
        try:
            yield
        finally:
            self._task = before

    def begin(self, task: str) -> None:
        """Name the call of the user that has begun; ``end`` it."""
        # what it gathers may meet what another rank gathers for another reason: it is over then
        self._task = self._last_task = task

    def end(self) -> None:
        """Leave the call of the user."""
        self._task = ""

    def note_gather(self, chunk: Chunk) -> None:
        """Remember a gather for the next agreement."""
        # hashes of tuples of integers are the same in every process
        self.gathered_print = hash((self.gathered_print, chunk.index)) & _POSITIVE
        self._gathered.append(chunk)

    def forget_gathers(self) -> None:
        """All ranks have agreed on what was gathered."""
        self.gathered_print = 0
        self._gathered.clear()
        self._last_task = self._task

    def other_order(self) -> DivergenceError:
        """Return the error for ranks that gathered in different orders. All ranks call it."""
        everyone = self._exchange([f"gather of {chunk.label}" for chunk in self._gathered])
        sequences = [sequence for sequence in everyone.values() if sequence is not None]
        longest = max((len(sequence) for sequence in sequences), default=0)
        rows = [[s[i] if i < len(s) else "nothing" for s in sequences] for i in range(longest)]
        position = next((i for i, row in enumerate(rows) if len(set(row)) > 1), longest)
        notes = {
            rank: f"step {self.step}: "
            + (sequence[position] if position < len(sequence) else "no further gather")
            for rank, sequence in everyone.items()
            if sequence is not None
        }
        return _divergence(notes)

    def places(self) -> dict[int, str | None]:
        """Return what every rank was at, None where no answer came in time."""
        what = self._what if self._chunk is None else f"{self._what} {self._chunk.label}"
        task = f", after {self._last_task}" if self._last_task else ""
        task = f", in {self._task}" if self._task else task
        return self._exchange(f"step {self.step}{task}: {what} (event {self._count})")

    def _exchange(self, note: NoteT) -> dict[int, NoteT | None]:
        """Give a note to all ranks and return theirs by global rank."""
        group = self.axis.group
        if group is None:
            return {}
        store = _get_process_group_store(group)
        ranks = dist.get_process_group_ranks(group)
        # a rank that is a step behind or ahead looks under another key: leave the note at each
        for step in range(max(0, self.step - 1), self.step + 2):
            key = f"shardwise/{self.axis.lane}/{step}/{dist.get_rank()}"
            store.set(key, json.dumps(note))
        notes: dict[int, NoteT | None] = {}
        for rank in ranks:
            key = f"shardwise/{self.axis.lane}/{self.step}/{rank}"
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
        notes = whereabouts.places()
        if len(set(notes.values())) <= 1:
            raise
        raise _divergence(notes) from error


def _divergence(notes: Mapping[int, str | None]) -> DivergenceError:
    """Return the error that says where every rank was."""
    lines = "; ".join(
        f"rank {rank} {'gave no answer' if note is None else f'was at {note}'}"
        for rank, note in notes.items()
    )
    return DivergenceError(
        mismatch(
            "all ranks",
            expected="the same sequence of communication",
            got=lines,
            fix="call the same modules, and state_dict() and the like, in the same order on every "
            "rank (a unit that some ranks skip must lie inside a larger unit)",
        )
    )
