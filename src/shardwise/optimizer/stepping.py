"""Run the wrapped optimizer on reduced gradients and hand each updated chunk on.

Optimizers of torch keep their state per parameter, so they are run chunk by chunk: a chunk's
all-gather overlaps the update of the next, and gradients in the update's dtype exist for one chunk
at a time. Any other optimizer (or one with step hooks) is run once for all pieces. Either way its
public ``step`` is called exactly once.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from shardwise.optimizer.kinds import STATE_PER_PARAMETER, known_as
from shardwise.optimizer.pieces import shape_piece
from shardwise.residency import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from shardwise.optimizer.binding import Binding
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.managed import ManagedParameter


class Factors:
    """What stored gradients are divided and multiplied by before the update."""

    def __init__(self, divisors: dict[Engine, float], clip: float) -> None:
        """Divide by the engine's loss scale times weight, then multiply by the clip coefficient."""
        self._divisors = divisors
        self._clip = clip

    def are_neutral(self, engine: Engine) -> bool:
        """Return whether stored gradients are used as they are."""
        return self._divisors[engine] == 1.0 and self._clip == 1.0

    def apply_(self, gradient: torch.Tensor, engine: Engine) -> torch.Tensor:
        """Scale a gradient in place."""
        if self._divisors[engine] != 1.0:
            gradient.div_(self._divisors[engine])
        if self._clip != 1.0:
            gradient.mul_(self._clip)
        return gradient


class Stepper:
    """Steps one optimizer over the chunks of its members."""

    def __init__(self, optimizer: torch.optim.Optimizer, binding: Binding) -> None:
        """Serve one optimizer."""
        self._optimizer = optimizer
        self._binding = binding

    def step(self, factors: Factors) -> None:
        """Update every member with a gradient and publish its chunk.

        Whatever fails on the way, chunks that may have changed are published, so that ranks stay in
        step and equal. Collectives: one all-gather per touched chunk, started here.
        """
        by_chunk: dict[Chunk, list[ManagedParameter]] = {}
        for record in self._binding.records():
            if record.is_held:
                by_chunk.setdefault(record.chunk, []).append(record)
        order = [c for engine in self._binding.engines() for c in engine.chunks if c in by_chunk]
        is_per_chunk = self._runs_per_chunk()
        for engine in self._binding.engines():
            if engine.offload is not None:
                chunks = [chunk for chunk in order if chunk.records[0].engine is engine]
                engine.offload.check_room_for_all(
                    chunks, engine.topology, is_at_once=not is_per_chunk
                )
        for records in by_chunk.values():
            for record in records:
                record.is_spent = True
        if not order and all(p.grad is None for p in self._binding.left_out()):
            return
        if is_per_chunk:
            self._step_per_chunk(order, by_chunk, factors)
        else:
            self._step_once(order, by_chunk, factors)

    def _runs_per_chunk(self) -> bool:
        """Return whether splitting the step over chunks changes nothing that anyone sees."""
        optimizer = self._optimizer
        hooks = (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        return known_as(type(optimizer)) in STATE_PER_PARAMETER and not any(hooks)

    def _step_per_chunk(
        self,
        order: Sequence[Chunk],
        by_chunk: dict[Chunk, list[ManagedParameter]],
        factors: Factors,
    ) -> None:
        """Update chunk after chunk; the last one, with what is not sharded, by ``step`` itself."""
        unhooked: Callable[..., Any] = type(self._optimizer).step.__wrapped__  # type: ignore
        remaining: list[Chunk] = list(order)
        begun: set[Chunk] = set()
        try:
            for position, chunk in enumerate(order):
                is_last = chunk is order[-1]
                with self._binding.resting.at_hand(chunk):
                    begun.add(chunk)
                    chunk.own.take_working()
                    for following in order[position + 1 : position + 2]:
                        following.own.prefetch()
                    with (
                        self._gradients(by_chunk[chunk], factors),
                        self._only(chunk, with_left_out=is_last),
                    ):
                        if is_last:
                            self._optimizer.step()
                        else:
                            unhooked(self._optimizer)
                    self._publish(chunk)
                    remaining.pop(0)
            if not order:
                self._optimizer.step()
        finally:
            self._publish_after_error(remaining, begun)

    def _step_once(
        self,
        order: Sequence[Chunk],
        by_chunk: dict[Chunk, list[ManagedParameter]],
        factors: Factors,
    ) -> None:
        """Update all pieces in one call."""
        records = [record for chunk in order for record in by_chunk[chunk]]
        remaining: list[Chunk] = list(order)
        begun: set[Chunk] = set()
        try:
            with ExitStack() as stack:
                for chunk in order:
                    stack.enter_context(self._binding.resting.at_hand(chunk))
                    chunk.own.take_working()
                begun.update(order)
                with self._gradients(records, factors):
                    self._optimizer.step()
                for chunk in order:
                    self._publish(chunk)
                    remaining.pop(0)
        finally:
            self._publish_after_error(remaining, begun)

    @staticmethod
    def _publish(chunk: Chunk) -> None:
        """Round the update into the working slice and send it."""
        engine = chunk.records[0].engine
        chunk.own.refresh_working()
        engine.recorder.note((chunk,), Segment.UPDATE)
        engine.values.publish(chunk)

    @staticmethod
    def _publish_after_error(chunks: Sequence[Chunk], begun: set[Chunk]) -> None:
        """Send what other ranks wait for; of those in ``begun`` something may have changed."""
        for chunk in chunks:
            if chunk in begun:
                with suppress(Exception):  # the first error is on its way up
                    chunk.own.refresh_working()
            chunk.records[0].engine.values.publish(chunk)

    @contextmanager
    def _only(self, chunk: Chunk, *, with_left_out: bool) -> Generator[None]:
        """Let the optimizer see only the pieces of one chunk."""
        groups = self._optimizer.param_groups
        before = [group["params"] for group in groups]
        visible = self._binding.visible_in(chunk, with_left_out=with_left_out)
        for group, params in zip(groups, visible, strict=True):
            group["params"] = params
        try:
            yield
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    @contextmanager
    def _gradients(self, records: Sequence[ManagedParameter], factors: Factors) -> Generator[None]:
        """Give the pieces of some records their gradients, scaled and in the update's dtype."""
        ready: dict[Chunk, torch.Tensor] = {}
        pieces: list[torch.nn.Parameter] = []
        for record in records:
            piece, chunk = self._binding.piece(record), record.chunk
            if piece is None or chunk.own.gradient_S is None:
                continue
            if chunk not in ready:
                ready[chunk] = self._update_gradient(chunk, record.engine, factors)
            piece.grad = shape_piece(record, ready[chunk])
            pieces.append(piece)
        try:
            yield
        finally:
            for piece in pieces:
                piece.grad = None

    @staticmethod
    def _update_gradient(chunk: Chunk, engine: Engine, factors: Factors) -> torch.Tensor:
        """Return the slice's gradient for the update; the stored one stays as it is."""
        stored_S = chunk.own.gradient_S
        assert stored_S is not None
        dtype, device = chunk.own.update_S.dtype, chunk.own.update_S.device
        stored_S = stored_S.to(device)  # stage 1: the gradient lies in the whole buffer
        if factors.are_neutral(engine):
            return stored_S.to(dtype)
        # 16-bit updates are scaled in float32 too: a small factor would underflow before it
        wide = torch.promote_types(dtype, torch.float32)
        return factors.apply_(stored_S.to(wide, copy=True), engine).to(dtype)
