"""Run the wrapped optimizer on reduced gradients and hand each updated chunk on.

Optimizers of torch keep their state per parameter, so they are run chunk by chunk: a chunk's
all-gather overlaps the update of the next, and gradients in the update's dtype exist for one chunk
at a time. Where each element is updated by itself a chunk is updated tile by tile (``tiles``).
Any other optimizer (or one with step hooks) is run once for all pieces. Either way its public
``step`` is called exactly once.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch.optim import optimizer as torch_optimizer

from shardwise.optimizer.kinds import ELEMENT_WISE, STATE_PER_PARAMETER, known_as
from shardwise.optimizer.pieces import shape_piece
from shardwise.optimizer.tiles import Parts, cut_tiles, tile_numel
from shardwise.optimizer.update_gradient import (
    NewMemory,
    OneTile,
    needs_copy,
    read_gradient,
)
from shardwise.residency import Segment
from shardwise.runtime.own_slices import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch

    from shardwise.optimizer.binding import Binding
    from shardwise.optimizer.tiles import Tile
    from shardwise.optimizer.update_gradient import Factors
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.managed import ManagedParameter


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
        remaining: list[Chunk] = list(order)
        begun: set[Chunk] = set()
        buffers = OneTile(min(tile_numel(), max((c.own.numel for c in order), default=0)))
        try:
            for position, chunk in enumerate(order):
                with self._binding.resting.at_hand(chunk):
                    begun.add(chunk)
                    for following in order[position + 1 : position + 2]:
                        following.own.prefetch()
                    self._update(
                        chunk,
                        by_chunk[chunk],
                        factors,
                        buffers,
                        is_last=chunk is order[-1],
                    )
                    self._publish(chunk)
                    remaining.pop(0)
            if not order:
                self._optimizer.step()
        finally:
            self._publish_after_error(remaining, begun)

    # ------------------------------------------------------------------ one chunk

    def _update(
        self,
        chunk: Chunk,
        records: Sequence[ManagedParameter],
        factors: Factors,
        buffers: OneTile,
        *,
        is_last: bool,
    ) -> None:
        """Update one chunk and round it into its working slice."""
        tiles = self._cut(chunk, records, factors)
        if tiles is not None:
            self._update_tiles(chunk, tiles, factors, buffers, is_last=is_last)
            return
        chunk.own.take_working()
        visible = self._binding.visible_in(chunk)
        with self._gradients(records, factors):
            self._run(visible, is_last=is_last)
        chunk.own.refresh_working()

    def _cut(
        self, chunk: Chunk, records: Sequence[ManagedParameter], factors: Factors
    ) -> list[Tile] | None:
        """Return the tiles of a chunk's update, None where it is better done, or only right, whole.

        Caches matter to a CPU alone; torch's fused kernel is one pass already.
        """
        own, optimizer = chunk.own, self._optimizer
        groups = optimizer.param_groups
        if (
            known_as(type(optimizer)) not in ELEMENT_WISE
            or own.gradient_S is None
            or own.update_S.device.type != "cpu"
            or any(group.get("differentiable") for group in groups)
        ):
            return None
        is_fused = all(group.get("fused") for group in groups)
        is_one_pass = is_fused and not own.has_master
        if is_one_pass and not needs_copy(own, chunk.records[0].engine, factors):
            return None
        return cut_tiles(records, own.numel, tile_numel=tile_numel())

    def _update_tiles(
        self,
        chunk: Chunk,
        tiles: Sequence[Tile],
        factors: Factors,
        buffers: OneTile,
        *,
        is_last: bool,
    ) -> None:
        """Update tile after tile, each rounded into the working slice while it is in the cache."""
        own, engine = chunk.own, chunk.records[0].engine
        visible = self._binding.visible_in(chunk)
        group_of = {piece: number for number, some in enumerate(visible) for piece in some}
        parts = Parts(self._optimizer, self._binding.piece)
        num_taken = 0
        try:
            for tile in tiles:
                elements = slice(tile.start, tile.stop)
                own.take_working(elements)
                num_taken = tile.stop
                is_final = is_last and tile is tiles[-1]
                if tile.parts or is_final:
                    gradient = read_gradient(own, engine, factors, elements, buffers)
                    with parts.shown(tile, gradient) as shown:
                        seen: list[list[torch.nn.Parameter]] = [[] for _ in visible]
                        for piece, part in shown:
                            seen[group_of[piece]].append(part)
                        self._run(seen, is_last=is_final)
                own.refresh_working(elements)
            parts.finish()
        except BaseException:
            own.take_working(slice(num_taken, None))  # what is published is all of the master
            raise

    def _run(self, visible: list[list[torch.nn.Parameter]], *, is_last: bool) -> None:
        """Run the optimizer on some parameters; the last time by ``step``, on the unsharded too."""
        unhooked: Callable[..., Any] = type(self._optimizer).step.__wrapped__  # type: ignore
        groups = self._optimizer.param_groups
        before = [group["params"] for group in groups]
        left_out = self._binding.visible_left_out()
        for group, some, others in zip(groups, visible, left_out, strict=True):
            group["params"] = some + others if is_last else some
        try:
            if is_last:
                self._optimizer.step()
            else:
                unhooked(self._optimizer)
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    # ------------------------------------------------------------------ all chunks at once

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
                    chunk.own.refresh_working()
                    self._publish(chunk)
                    remaining.pop(0)
        finally:
            self._publish_after_error(remaining, begun)

    @staticmethod
    def _publish(chunk: Chunk) -> None:
        """Send what was updated."""
        engine = chunk.records[0].engine
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
    def _gradients(self, records: Sequence[ManagedParameter], factors: Factors) -> Generator[None]:
        """Give the pieces of some records their gradients, scaled and in the update's dtype."""
        ready: dict[Chunk, torch.Tensor] = {}
        pieces: list[torch.nn.Parameter] = []
        for record in records:
            piece, chunk = self._binding.piece(record), record.chunk
            if piece is None or chunk.own.gradient_S is None:
                continue
            if chunk not in ready:
                ready[chunk] = read_gradient(
                    chunk.own, record.engine, factors, EVERYTHING, NewMemory()
                )
            piece.grad = shape_piece(record, ready[chunk])
            pieces.append(piece)
        try:
            yield
        finally:
            for piece in pieces:
                piece.grad = None
