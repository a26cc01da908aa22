"""The training state on this rank as a whole: a model, its optimizer, and what surrounds them."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.checkpoint.contents import Contents, Named
from shardwise.checkpoint.entries import Entry, Part, Thing, encode, parts_of_piece, whole, writes
from shardwise.checkpoint.optimizer_entries import OptimizerState
from shardwise.checkpoint.random_state import random_state
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import CheckpointError, ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from shardwise.runtime.managed import ManagedParameter

OURS = "shardwise."
EXTRA = f"{OURS}extra"
FACTS = f"{OURS}state"


class TrainingState:
    """What is saved, and where it is loaded to.

    Legend: *whole* is what every rank holds whole: buffers, parameters left out of sharding, and
    their optimizer state. The first rank writes it; ranks whose values differ add their own.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Read what is there.

        Raises:
            CheckpointError: Model and optimizer do not belong together, or are none.
        """
        if not isinstance(model, nn.Module):
            raise _bad("model", "a torch.nn.Module", type(model).__name__)
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise _bad("optimizer", "a torch.optim.Optimizer or None", type(optimizer).__name__)
        self.contents = Contents(model)
        self.engines = self.contents.engines
        self.ranks = Ranks.of(self.engines)
        self.device = next((n.tensor.device for n in self.contents.tensors), torch.device("cpu"))
        self._given = optimizer
        self.optimizer: OptimizerState | None = None

    def rest(self, what: str) -> None:
        """Finish what is under way, so that slices and masters hold the newest values.

        Raises:
            ShardwiseError: In the middle of an accumulation, or while parameters are gathered.
        """
        for engine in self.engines:
            if engine.reducer.is_open:
                raise _busy(what, "a backward pass that ended in an error")
            for record in engine.records:
                if _waits(record):
                    raise _busy(what, f"a gradient that waits for a step ({record.name})")
        for engine in self.engines:
            engine.values.settle()
            engine.reducer.watch()
            engine.values.refresh_changed_masters()
        if self._given is not None:
            self.optimizer = OptimizerState(self._given, self.contents)

    @contextmanager
    def at_hand(self, *, is_changed: bool) -> Generator[None]:
        """Inside, state that rests on disk is in host memory, all of this rank's at once."""
        binding = None if self.optimizer is None else self.optimizer.anatomy.binding
        with ExitStack() as stack:
            for chunk in (chunk for engine in self.engines for chunk in engine.chunks):
                if binding is None:
                    stack.enter_context(chunk.own.at_hand(is_changed=is_changed))
                else:
                    stack.enter_context(binding.resting.at_hand(chunk, is_changed=is_changed))
            yield

    def load_options(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer groups and scaling, and no state."""
        assert self._given is not None
        self._given.load_state_dict(state_dict)

    # ------------------------------------------------------------------ saving

    def prints(self) -> dict[str, str]:
        """Return a fingerprint of everything that every rank holds whole."""
        if self.ranks.size == 1:
            return {}
        return {part.names[0]: _fingerprint(part.tensor) for part in self._whole()}

    def entries(
        self,
        own_prints: dict[str, str],
        first_prints: dict[str, str],
        counters: set[str],
        extra: dict[str, Any],
    ) -> list[Entry]:
        """Return what this rank writes.

        Args:
            own_prints: ``prints`` of this rank.
            first_prints: Those of the first rank.
            counters: See ``OptimizerState``.
            extra: The user's own.
        """
        entries: list[Entry] = list(self._pieces())
        for part in self._whole():
            name = part.names[0]
            if self.ranks.is_first:
                entries.append(part)
            elif first_prints.get(name) != own_prints[name]:
                entries.append(whole((self.own_name(name),), part.tensor))
        if self.optimizer is not None:
            entries += self.optimizer.entries(counters)
        entries += self._things(extra)
        return entries

    def own_name(self, name: str) -> str:
        """Return how a value is called that this rank alone has."""
        return f"{OURS}rank{self.ranks.rank}.{name}"

    def pieces_of(self, named: Named) -> list[Part]:
        """Return the owned boxes of a managed parameter, in the most exact values there are."""
        record = named.record
        assert record is not None
        values = record.piece_in(record.chunk.own.update_S)
        return [] if values is None else parts_of_piece(named.names, record, values)

    def _pieces(self) -> Iterator[Part]:
        """Yield the boxes of parameters that this rank writes."""
        for named in self.contents.parameters:
            record = named.record
            if record is not None and record.numel == 0:
                if self.ranks.is_first:
                    dtype = record.chunk.own.update_dtype
                    empty = torch.empty(named.tensor.shape, dtype=dtype)
                    yield whole(named.names, empty)
            elif record is not None and writes(record):
                yield from self.pieces_of(named)

    def _whole(self) -> list[Part]:
        """Return everything that every rank holds whole."""
        parts = [whole(named.names, named.tensor) for named in self.contents.left_out]
        return parts if self.optimizer is None else parts + self.optimizer.left_out()

    def _things(self, extra: dict[str, Any]) -> Iterator[Thing]:
        """Yield objects: the random state of this rank, and from the first rank all others."""
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


def _fingerprint(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bits."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


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
