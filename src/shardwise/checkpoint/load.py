"""``shardwise.load``: every rank reads what its pieces need, wherever it was written.

Order: verify, compare names and shapes, agree - only then write, and send updated slices.
"""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.background import settle_all
from shardwise.checkpoint.entries import whole
from shardwise.checkpoint.optimizer_load import Rooms
from shardwise.checkpoint.optimizer_plan import OptimizerPlan, plan_optimizer
from shardwise.checkpoint.plan import ModelPlan, Problems, plan_model
from shardwise.checkpoint.random_state import set_random_state
from shardwise.checkpoint.ranks import refuse_differences
from shardwise.checkpoint.source import Source, identity, refuse_other, verify
from shardwise.checkpoint.state import EXTRA, FACTS, TrainingState
from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

    from shardwise.checkpoint.contents import Named
    from shardwise.checkpoint.entries import Part
    from shardwise.runtime.chunk import Chunk


@torch.inference_mode(False)  # what is made here is changed by training
@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Load training state that was saved at any world size, stage and precision.

    Args:
        path: What ``save`` wrote, or any ``torch.distributed.checkpoint`` under the names of
            ``get_model_state_dict`` and ``get_optimizer_state_dict``. The first rank's counts.
        model: Any module, sharded or not.
        optimizer: Takes over state, group options and loss scaling. At the world size that wrote
            the checkpoint the random state of every rank continues too. None loads weights only.
        strict: Refuse names that only the model, or only the checkpoint, has. Shapes must match in
            any case.

    Returns:
        ``extra`` as it was saved, an empty dict without it.

    Raises:
        CheckpointError: On all ranks. A file is damaged (it is named), names or shapes do not
            match, or gradients wait for a step: nothing was changed. If the storage fails after
            these checks, the message says that the state is partly loaded.

    Collectives: a few small exchanges of objects, and an all-gather per chunk below stage 3.

    Memory: one stored box, which is one piece of one writer, and the state of one chunk where it
    rests on disk. No code from the files is run.
    """
    state = TrainingState(model, optimizer)
    ranks = state.ranks
    settle_all(state.engines, ranks)

    def rest() -> dict[str, object]:
        state.rest("load")
        return {"an optimizer": state.has_optimizer, "strict": strict}

    refuse_differences(ranks.exchange(rest))
    with ranks.agreed():
        folder = Path(os.path.abspath(path))  # noqa: PTH100 - the path itself, links unresolved
    folder = ranks.share(folder)
    found = ranks.exchange(partial(verify, folder, ranks))
    refuse_other(folder, found, found[0])
    with ranks.agreed():
        source = Source(folder)
    with closing(source):
        with ranks.agreed():
            facts = source.object(FACTS) if FACTS in source.index.names else {}
            extra = source.object(EXTRA) if EXTRA in source.index.names else {}
            problems = Problems()
            plan = plan_model(state, source.index, problems)
            optimizer_plan = (
                None
                if state.optimizer is None
                else plan_optimizer(state.optimizer, source, problems)
            )
            refuse_other(folder, [identity(folder)], found[0])
            _refuse(problems.say(strict=strict), path)
        with ranks.agreed(), _complete(path):
            _apply(state, source, plan, optimizer_plan, facts)
            refuse_other(folder, [identity(folder)], found[0])
        _announce(state, plan)
        with ranks.agreed(), _complete(path):
            _apply_rest(state, source, plan, facts)
    return extra


@contextmanager
def _complete(path: str | os.PathLike[str]) -> Generator[None]:
    """Say of an error inside that it came when the state was partly loaded."""
    try:
        yield
    except Exception as error:
        raise _half_loaded(path, error) from error


def _apply(
    state: TrainingState,
    source: Source,
    plan: ModelPlan,
    optimizer_plan: OptimizerPlan | None,
    facts: dict[str, Any],
) -> None:
    """Write own pieces and their state, and what every rank holds whole; round the masters."""
    prefers_own = facts.get("world_size") == state.ranks.size
    rooms = None
    if optimizer_plan is not None:
        rooms = Rooms(state, source, optimizer_plan, prefers_own=prefers_own)
        rooms.take_options(facts)
    with closing(state.batches(is_changed=True)) as batches:
        for has in batches:
            parts: list[tuple[str, Part]] = []
            for named, stored in plan.tensors.items():
                if has(named.record):
                    parts += _parts_of(state, source, named, stored, prefers_own=prefers_own)
            if rooms is not None:
                parts += rooms.make(has)
            source.fill_parts(parts)
            for chunk in _touched(plan):
                if has(chunk.records[0]):
                    chunk.own.refresh_working()


def _parts_of(
    state: TrainingState, source: Source, named: Named, stored: str, *, prefers_own: bool
) -> list[tuple[str, Part]]:
    """Return the boxes of one parameter or buffer, with the names they are stored under."""
    if named.record is not None:
        return [(stored, part) for part in state.pieces_of(named)]
    own = state.own_name(named.names[0])
    is_own = prefers_own and own in source.index.tensors
    return [(own if is_own else stored, whole(named.names, named.tensor))]


def _touched(plan: ModelPlan) -> list[Chunk]:
    """Return the chunks that something was read into."""
    records = [named.record for named in plan.tensors if named.record is not None]
    return list({record.chunk: None for record in records})


def _announce(state: TrainingState, plan: ModelPlan) -> None:
    """Send working values. Collectives: one all-gather per chunk."""
    touched = set(_touched(plan))
    for engine in state.engines:
        for chunk in engine.chunks:
            if chunk in touched:
                engine.values.announce(chunk)
        engine.values.settle()


def _apply_rest(
    state: TrainingState, source: Source, plan: ModelPlan, facts: dict[str, Any]
) -> None:
    """Hand on everything that is no tensor."""
    for name, stored in plan.owners.items():
        state.contents.owners[name].set_extra_state(source.value(stored))
    if state.optimizer is None:
        return
    random = state.own_name("random")
    if facts.get("world_size") == state.ranks.size and random in source.index.names:
        set_random_state(source.object(random), state.device)


def _refuse(problem: str | None, path: object) -> None:
    """Raise where a checkpoint does not fit."""
    if problem is not None:
        raise CheckpointError(
            mismatch(
                f"checkpoint {path}",
                expected="the names and shapes of the model and its optimizer",
                got=problem,
                fix="load it into what it was saved from; strict=False passes over names that only "
                "one side has, not over shapes",
            )
        )


def _half_loaded(path: object, error: Exception) -> CheckpointError:
    """Return the error for storage that fails in the middle."""
    return CheckpointError(
        mismatch(
            f"checkpoint {path}",
            expected="no error once values are being written",
            got=f"{type(error).__name__}: {error}",
            fix="load a checkpoint before training on: the state is partly loaded",
        )
    )
