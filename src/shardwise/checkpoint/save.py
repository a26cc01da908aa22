"""``shardwise.save``: every rank writes its own pieces, the first rank publishes the whole.

Order: bring training to rest, agree - write one file per rank, agree - index, manifest, one rename,
agree. Until the rename nothing that was there before is touched.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from shardwise.checkpoint.background import Background, PendingSave, settle_all, stage
from shardwise.checkpoint.data_file import FileReport, write_bytes, write_file
from shardwise.checkpoint.folder import Draft, Writing, next_time_ns, retain
from shardwise.checkpoint.index import INDEX, make_index
from shardwise.checkpoint.manifest import MANIFEST, Manifest
from shardwise.checkpoint.state import TrainingState
from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from torch import nn

    from shardwise.checkpoint.entries import Entry
    from shardwise.checkpoint.ranks import Ranks


@torch.no_grad()
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    keep_last: int | None = None,
    async_: bool | Literal["wait", "refuse"] = False,
) -> PendingSave | None:
    """Save training state so that it loads at any world size, stage, precision, in plain torch.

    The folder is a ``torch.distributed.checkpoint`` under the names of the plain model. Saved are
    parameters (exact float32 masters where there are some), buffers, all optimizer state and group
    options, loss scaling, the random state of every rank, and ``extra``.

    Either the whole checkpoint appears under ``path``, in place of one that is there, or nothing
    changes - also when ranks are killed or the disk is full.

    Args:
        path: A folder on storage that all ranks share; its parents are made.
        model: Any module, sharded or not.
        optimizer: Its ``ShardedOptimizer``, or the plain optimizer of a plain model. None saves
            weights only.
        extra: Anything that ``torch.load(weights_only=True)`` can read: step, position in the data,
            ``scheduler.state_dict()``. The first rank's is saved.
        keep_last: Afterwards remove all but this many of the newest checkpoints beside it.
        async_: Return once the state is copied to the host, and write beside training. If the save
            before still writes, True or "wait" waits for it, "refuse" raises.

    Returns:
        None, or with ``async_`` what is under way: ``wait()`` returns when it is published,
        ``is_done`` asks, ``staged_bytes`` is the host memory held until then. An error is raised by
        ``wait``, and by the next ``save`` or ``load``. Wait before the process group is destroyed.

    Raises:
        CheckpointError: On all ranks: gradients wait for a step, something cannot be saved, or the
            storage failed. Nothing was published.

    Collectives: about ten small exchanges of objects, on all ranks.

    Memory: a copy of one piece on the CPU; with ``async_`` a copy of all that this rank writes.
    State that rests on disk is in host memory meanwhile.

    Example:
        >>> import tempfile, torch, shardwise as sw
        >>> model = sw.shard(torch.nn.Linear(4, 2), stage=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sw.save(f"{folder}/step-1", model, extra={"step": 1})
        ...     sw.load(f"{folder}/step-1", model)
        {'step': 1}
    """
    state = TrainingState(model, optimizer)
    ranks = state.ranks
    with ranks.agreed():
        target = Path(os.path.abspath(path))  # noqa: PTH100 - the path itself, links unresolved
        _check_arguments(keep_last, async_, state)
    settle_all(state.engines, ranks, refuses=async_ == "refuse")
    with ranks.agreed():
        state.rest("save")
        prints = state.prints()
        counters = set() if state.optimizer is None else state.optimizer.counters()
    shown = ranks.gather(counters)
    first_prints = ranks.share(prints)
    with ExitStack() as hand:
        with ranks.agreed():
            hand.enter_context(state.at_hand(is_changed=False))
            entries = state.entries(prints, first_prints, set().union(*shown), dict(extra or {}))
            staged_bytes = 0
            if async_:
                entries, staged_bytes = stage(entries)
                hand.close()
        writing: Writing | None = None
        with ranks.agreed():
            if ranks.is_first:
                writing = Writing(target)
        draft = ranks.share(None if writing is None else writing.draft)
        assert draft is not None
        if not async_:
            _carry_out(ranks, draft, entries, writing, keep_last)
            return None
    background = Background.make(state.engines[0], ranks)
    job = partial(_carry_out, background.ranks, draft, entries, writing, keep_last)
    return background.start(job, staged_bytes)


def _carry_out(
    ranks: Ranks,
    draft: Draft,
    entries: list[Entry],
    writing: Writing | None,
    keep_last: int | None,
) -> None:
    """Write and publish; the first rank alone has the draft to itself."""
    try:
        with ranks.agreed():
            report = _write(draft, ranks.rank, entries)
        reports = ranks.collect(report)
        with ranks.agreed():
            if writing is not None:
                _finish(writing, reports, keep_last)
    finally:
        if writing is not None:
            writing.close()


def _write(draft: Draft, rank: int, entries: list[Entry]) -> FileReport:
    """Write this rank's file."""
    return write_file(draft.folder / f"__{rank}_0.distcp", entries)


def _finish(writing: Writing, reports: list[FileReport], keep_last: int | None) -> None:
    """Write what describes the files of all ranks, and publish them."""
    folder, parent = writing.draft.folder, writing.draft.target.parent
    files = {report.name: report.sum for report in reports}
    files[INDEX] = write_bytes(folder / INDEX, make_index(reports))
    manifest = Manifest(world_size=len(reports), saved_ns=next_time_ns(parent), files=files)
    write_bytes(folder / MANIFEST, manifest.to_bytes())
    writing.publish()
    writing.close()
    if keep_last is not None:
        retain(parent, keep_last)


def _check_arguments(keep_last: object, async_: object, state: TrainingState) -> None:
    """Refuse arguments that cannot work."""
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise CheckpointError(
            mismatch(
                "keep_last", expected="a positive int or None", got=repr(keep_last), fix="keep one"
            )
        )
    if async_ not in (False, True, "wait", "refuse"):
        raise CheckpointError(
            mismatch(
                "async_", expected="False, True, 'wait' or 'refuse'", got=async_, fix="pass one"
            )
        )
    if async_ and not state.engines:
        raise CheckpointError(
            mismatch(
                "async_",
                expected="a sharded model",
                got="a plain one",
                fix="call shardwise.shard(model, stage=0) first, or save synchronously",
            )
        )
