"""The training state on this rank as a whole: a model, its optimizer, and what surrounds them."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.contents import Contents, Named
from shardwise.checkpoint.data_file import bytes_of
from shardwise.checkpoint.entries import Entry, Part, Thing, encode, parts_of_piece, whole, writes
from shardwise.checkpoint.hashes import hash_of
from shardwise.checkpoint.index import OF_OPTIMIZER
from shardwise.checkpoint.optimizer_entries import OptimizerState
from shardwise.checkpoint.random_state import random_state
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import CheckpointError, ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from contextlib import AbstractContextManager

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.managed import ManagedParameter

OURS = "shardwise."
EXTRA = f"{OURS}extra"
FACTS = f"{OURS}state"
ABSENT = "absent"
"""Names that the first rank has and another lacks, among what every rank holds whole."""


def own_name(rank: int, name: str) -> str:
    """Return how a value is called that one rank alone has."""
    return f"{OURS}rank{rank}.{name}"


class TrainingState:
    """What is saved, and where it is loaded to.

    Legend: *whole* is what every rank holds whole: buffers, parameters left out of sharding, and
    their optimizer state. The first rank writes it; ranks whose values differ add their own.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Read what is there.

        Raises:
            CheckpointError: The model is none.
        """
        if not isinstance(model, nn.Module):
            raise _bad("model", "a torch.nn.Module", type(model).__name__)
        self.contents = Contents(model)
        self.engines = self.contents.engines
        self.ranks = Ranks.of(self.engines)
        self.device = next((n.tensor.device for n in self.contents.tensors), torch.device("cpu"))
        self._given = optimizer
        self.optimizer: OptimizerState | None = None

    @property
    def has_optimizer(self) -> bool:
        """The state is that of training, not of weights alone."""
        return self._given is not None

    def rest(self, what: str) -> None:
        """Finish what is under way, so that slices and masters hold the newest values.

        Raises:
            ShardwiseError: In the middle of an accumulation, or while parameters are gathered; or
                model and optimizer do not belong together.
        """
        if self.has_optimizer and not isinstance(self._given, torch.optim.Optimizer):
            got = type(self._given).__name__
            raise _bad("optimizer", "a torch.optim.Optimizer or None", got)
        for engine in self.engines:
            if engine.reducer.is_open:
                raise _busy(what, "a backward pass that ended in an error")
            for record in engine.records:
                if _waits(record):
                    raise _busy(what, f"a gradient that waits for a step ({record.name})")
        self._refuse_foreign()
        for engine in self.engines:
            engine.values.settle()
            engine.reducer.watch()
            engine.values.refresh_changed_masters()
        if self._given is not None:
            self.optimizer = OptimizerState(self._given, self.contents)

    def _refuse_foreign(self) -> None:
        """Refuse tensors that something else than shardwise has cut, and names that are ours."""
        for named in self.contents.tensors:
            name = named.names[0]
            if named.record is None and isinstance(named.tensor, DTensor):
                raise CheckpointError(
                    mismatch(
                        f"{name!r}",
                        expected="a plain tensor, or a parameter that shardwise shards",
                        got=f"a DTensor ({named.tensor.placements})",
                        fix="save and load such a model by torch.distributed.checkpoint with "
                        "get_model_state_dict and get_optimizer_state_dict: the folders are alike",
                    )
                )
            if any(one.startswith((*OF_OPTIMIZER, OURS)) for one in named.names):
                raise CheckpointError(
                    mismatch(
                        f"{name!r}",
                        expected=f"a name that begins with none of {(*OF_OPTIMIZER, OURS)}",
                        got="one that stands for something else in checkpoints",
                        fix="rename the module",
                    )
                )

    def batches(self, *, is_changed: bool) -> Generator[Callable[[ManagedParameter | None], bool]]:
        """Bring the state to hand in batches, one after the other.

        The first batch is everything that does not rest on disk, then one chunk at a time comes
        from there; the one before is put away first. Whoever stops early must close the generator.

        Args:
            is_changed: What was in a batch is written back.

        Yields:
            Whether what stands behind a record (None for what is whole) is in the batch.
        """
        chunks = [chunk for engine in self.engines for chunk in engine.chunks]
        away = [chunk for chunk in chunks if chunk.own.is_on_disk]
        with ExitStack() as stack:
            for chunk in chunks:
                if not chunk.own.is_on_disk:
                    stack.enter_context(self._at_hand(chunk, is_changed=is_changed))
            yield lambda record: record is None or not record.chunk.own.is_on_disk
        for chunk in away:
            with self._at_hand(chunk, is_changed=is_changed):
                yield lambda record, chunk=chunk: record is not None and record.chunk is chunk
            for engine in self.engines:
                engine.settle_moves()  # what is on its way back holds memory until it is there

    def _at_hand(self, chunk: Chunk, *, is_changed: bool) -> AbstractContextManager[None]:
        """Return a context in which all state of a chunk has values."""
        binding = None if self.optimizer is None else self.optimizer.anatomy.binding
        if binding is None:
            return chunk.own.at_hand(is_changed=is_changed)
        return binding.resting.at_hand(chunk, is_changed=is_changed)

    def load_options(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer groups and scaling, and no state."""
        assert self._given is not None
        self._given.load_state_dict(state_dict)

    # ------------------------------------------------------------------ saving

    def prints(self) -> dict[str, str]:
        """Return a fingerprint of everything that every rank holds whole."""
        if self.ranks.size == 1:
            return {}
        return {entry.names[0]: _fingerprint(entry) for entry in self._whole()}

    def entries(
        self,
        prints: tuple[dict[str, str], dict[str, str]],
        counters: set[str],
        things: Iterable[Thing],
    ) -> Generator[Entry]:
        """Yield what this rank writes, while it is at hand.

        Args:
            prints: Those of this rank, and of the first.
            counters: See ``OptimizerState``.
            things: See ``things``.
        """
        own_prints, first_prints = prints
        for entry in self._whole():
            name = entry.names[0]
            if self.ranks.is_first:
                yield entry
            elif name not in first_prints:  # for other world sizes this is all there is
                yield replace(entry, names=(*entry.names, self.own_name(name)))
            elif first_prints[name] != own_prints[name]:
                yield replace(entry, names=(self.own_name(name),))
        absent = sorted(first_prints.keys() - own_prints.keys())
        if absent:
            yield _thing(self.own_name(ABSENT), absent)
        with closing(self.batches(is_changed=False)) as batches:
            for has in batches:
                for named in self.contents.parameters:
                    if named.record is not None and has(named.record):
                        yield from self._pieces(named)
                if self.optimizer is not None:
                    yield from self.optimizer.entries(counters, has)
        yield from things

    def own_name(self, name: str) -> str:
        """Return how a value is called that this rank alone has."""
        return own_name(self.ranks.rank, name)

    def pieces_of(self, named: Named) -> list[Part]:
        """Return the owned boxes of a managed parameter, in the most exact values there are."""
        record = named.record
        assert record is not None
        values = record.piece_in(record.chunk.own.update_S)
        return [] if values is None else parts_of_piece(named.names, record, values)

    def _pieces(self, named: Named) -> list[Part]:
        """Return the boxes of a managed parameter that this rank writes."""
        record = named.record
        assert record is not None
        if record.numel:
            return self.pieces_of(named) if writes(record) else []
        empty = torch.empty(named.tensor.shape, dtype=record.chunk.own.update_dtype)
        return [whole(named.names, empty)] if self.ranks.is_first else []

    def _whole(self) -> list[Entry]:
        """Return everything that every rank holds whole."""
        parts: list[Entry] = [whole(n.names, n.tensor) for n in self.contents.left_out]
        return parts if self.optimizer is None else parts + self.optimizer.left_out()

    def things(self, extra: dict[str, Any]) -> Iterator[Thing]:
        """Yield objects: the random state of this rank, and from the first rank all others.

        Args:
            extra: The user's own.
        """
        yield _thing(self.own_name("random"), random_state(self.device))
        if not self.ranks.is_first:
            return
        scaler = None if self.optimizer is None else self.optimizer.anatomy.scaler
        facts = {
            "world_size": self.ranks.size,
            "loss_scaler": None if scaler is None else scaler.state_dict(),
        }
        yield _thing(FACTS, facts)
        yield _thing(EXTRA, extra)
        for name, owner in self.contents.owners.items():
            yield _thing(name, owner.get_extra_state())
        if self.optimizer is not None:
            yield from self.optimizer.groups()


def _waits(record: ManagedParameter) -> bool:
    """Return whether a gradient is held that some optimizer has not used yet."""
    if record.has_local_gradient:
        return True
    is_removed = record.engine.options.leaves_stand_ins and record.parameter.grad is None
    is_used_up = record.is_spent or record.is_zero or is_removed or not record.is_claimed
    return record.is_held and not is_used_up


def _thing(name: str, value: object) -> Thing:
    """Return an object under one name."""
    return Thing(names=(name,), data=encode(name, value))


def _fingerprint(entry: Entry) -> str:
    """Return a hash of a tensor's bits, or of an object."""
    if isinstance(entry, Thing):
        return hash_of(entry.data)
    flat = entry.tensor.detach().to("cpu").contiguous().reshape(-1)
    return hash_of(bytes_of(flat))


def _bad(what: str, expected: str, got: str) -> CheckpointError:
    """Return the error for an argument."""
    return CheckpointError(mismatch(what, expected=expected, got=got, fix="pass one"))


def _busy(what: str, got: str) -> ShardwiseError:
    """Return the error for a call at the wrong moment."""
    return CheckpointError(
        mismatch(
            what,
            expected="no gradients that a checkpoint would lose",
            got=got,
            fix="call it after optimizer.step(), or call optimizer.zero_grad() first",
        )
    )
