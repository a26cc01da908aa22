"""Say which rank went another way, when a communication between ranks fails or times out.

Each rank notes what it is about to do. When a wait fails, all ranks leave their note in the store
of their process group and read those of the others: if the notes differ, the error names them.
"""

from __future__ import annotations

import json
import time
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

_PATIENCE_S = 10.0
"""How long a failed rank waits for the notes of the others: these fail soon after it."""
_PATIENCE_WITH_THE_DEAD_S = 3.0
"""The same where the connection to a rank has broken, which will leave no note any more."""
_BROKEN = "by peer"
"""In what gloo says of such a connection."""
_POLL_S = 0.05


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
        self._has_failed = False
        """Notes were exchanged: whoever has left none by then is not waited for again."""
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
        self._has_failed = False
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

    def places(self, patience_s: float) -> dict[int, str | None]:
        """Return what every rank was at, None where no answer came in time."""
        what = self._what if self._chunk is None else f"{self._what} {self._chunk.label}"
        task = f", after {self._last_task}" if self._last_task else ""
        task = f", in {self._task}" if self._task else task
        note = f"step {self.step}{task}: {what} (event {self._count})"
        return self._exchange(note, 0.0 if self._has_failed else patience_s)

    def _exchange(self, note: NoteT, patience_s: float = _PATIENCE_S) -> dict[int, NoteT | None]:
        """Give a note to all ranks and return theirs by global rank; none where that fails."""
        self._has_failed = True
        group = self.axis.group
        if group is None:
            return {}
        store = _get_process_group_store(group)
        ranks = dist.get_process_group_ranks(group)
        try:
            # a rank that is a step behind or ahead looks under another key: leave it at each
            for step in range(max(0, self.step - 1), self.step + 2):
                key = f"shardwise/{self.axis.lane}/{step}/{dist.get_rank()}"
                store.set(key, json.dumps(note))
            keys = {rank: f"shardwise/{self.axis.lane}/{self.step}/{rank}" for rank in ranks}
            return _collect(store, keys, patience_s)
        except RuntimeError:  # the process that served the store is gone
            return {}


@contextmanager
def explain(whereabouts: Whereabouts) -> Generator[None]:
    """Turn a failed communication inside into a ``DivergenceError`` if ranks went other ways."""
    try:
        yield
    except ShardwiseError:
        raise
    except RuntimeError as error:
        is_broken = _BROKEN in str(error)
        notes = whereabouts.places(_PATIENCE_WITH_THE_DEAD_S if is_broken else _PATIENCE_S)
        if len(set(notes.values())) <= 1:
            raise
        raise _divergence(notes) from error


def _collect(
    store: dist.Store, keys: Mapping[int, str], patience_s: float
) -> dict[int, NoteT | None]:
    """Return the notes under some keys, None for those that do not come in time."""
    notes: dict[int, NoteT | None] = dict.fromkeys(keys)
    missing = list(keys)
    deadline_s = time.monotonic() + patience_s
    while True:
        is_over = time.monotonic() > deadline_s
        for rank in list(missing):
            if store.check([keys[rank]]):
                notes[rank] = json.loads(store.get(keys[rank]))
                missing.remove(rank)
        if not missing or is_over:
            return notes
        time.sleep(_POLL_S)


def _divergence(notes: Mapping[int, str | None]) -> DivergenceError:
    """Return the error that says where every rank was."""
    lines = "; ".join(
        f"rank {rank} {'gave no answer' if note is None else f'was at {note}'}"
        for rank, note in notes.items()
    )
    fix = (
        "call the same modules, and state_dict() and the like, in the same order on every rank (a "
        "unit that some ranks skip must lie inside a larger unit)"
    )
    if None in notes.values():
        fix = f"see whether a rank without an answer has ended; if not, {fix}"
    return DivergenceError(
        mismatch(
            "all ranks",
            expected="the same sequence of communication",
            got=lines or "others",
            fix=fix,
        )
    )
