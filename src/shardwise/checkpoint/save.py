"""``shardwise.save``: every rank writes its own pieces, the first rank publishes the whole.

Order: bring training to rest, agree - write one file per rank, agree - index, manifest, one rename,
agree. Until the rename nothing that was there before is touched.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from shardwise.checkpoint.background import Background, PendingSave, settle_all
from shardwise.checkpoint.data_file import FileReport, file_of, write_bytes, write_file
from shardwise.checkpoint.folder import Writing, next_time_ns, refuse_other_things, retain
from shardwise.checkpoint.index import INDEX, make_index
from shardwise.checkpoint.manifest import MANIFEST, Manifest
from shardwise.checkpoint.ranks import refuse_differences
from shardwise.checkpoint.state import TrainingState
from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from shardwise.checkpoint.entries import Entry
    from shardwise.checkpoint.ranks import Ranks


@torch.inference_mode(False)  # what is made here is changed by training
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
        ``wait``, and by the next ``save`` or ``load`` unless ``wait`` has told every rank. Wait
        before the process group is destroyed.

    Raises:
        CheckpointError: On all ranks: gradients wait for a step, something cannot be saved, or the
            storage failed. Nothing was published.

    Collectives: about eight small exchanges of objects, on all ranks; with ``async_`` the last five
    are made beside training.

    Memory: a copy of one piece on the CPU, and the state of one chunk where it rests on disk; with
    ``async_`` a copy of all that this rank writes, which is kept for the next such save.

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
    asked = ranks.exchange(partial(_read_arguments, state, extra, keep_last, async_))
    refuse_differences(asked)
    settle_all(state.engines, ranks, refuses=async_ == "refuse")

    def rest() -> set[str]:
        state.rest("save")
        return set() if state.optimizer is None else state.optimizer.counters()

    counters = set().union(*ranks.exchange(rest))
    with ranks.agreed():
        prints = state.prints()
        things = list(state.things(dict(extra or {})))
        target = Path(os.path.abspath(path))  # noqa: PTH100 - the path itself, links unresolved
        if ranks.is_first:
            refuse_other_things(target)
    entries = state.entries((prints, ranks.share(prints)), counters, things)
    if not async_:
        with closing(entries):
            _carry_out(ranks, target, entries, keep_last)
        return None
    background = Background.make(state.engines[0], ranks)
    with ranks.agreed(), closing(entries):
        staged, staged_bytes = background.staging.copy(entries)
    job = partial(_carry_out, background.ranks, target, staged, keep_last)
    return background.start(job, staged_bytes)


def _carry_out(ranks: Ranks, target: Path, entries: Iterable[Entry], keep_last: int | None) -> None:
    """Write and publish; the first rank alone has the draft to itself."""
    writing: Writing | None = None
    try:
        with ranks.agreed():
            if ranks.is_first:
                writing = Writing(target)
        draft = ranks.share(None if writing is None else writing.draft)
        assert draft is not None
        with ranks.agreed():
            report = write_file(draft.folder / file_of(ranks.rank), entries)
        reports = ranks.collect(report)
        with ranks.agreed():
            if writing is not None:
                _finish(writing, reports, keep_last)
    finally:
        if writing is not None:
            with suppress(OSError):  # the error that led here says more
                writing.close()


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


def _read_arguments(
    state: TrainingState, extra: object, keep_last: object, async_: object
) -> dict[str, object]:
    """Return what all ranks must ask for alike, or refuse what cannot work."""
    if not isinstance(extra, dict | None):
        raise CheckpointError(
            mismatch("extra", expected="a dict or None", got=type(extra).__name__, fix="pass one")
        )
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
    return {"async_": async_, "an optimizer": state.has_optimizer}
