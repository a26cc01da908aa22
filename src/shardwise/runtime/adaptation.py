"""Homes that follow what is known: sizes, then an optimizer's state, then what a step has taken.

==================  ================================================================================
sharded             nothing is measured: as little on the accelerator as the other tiers allow
optimizer wrapped   the sizes of its state are known: the same with these
before an update    the passes before it were measured: as much on the accelerator as fits beside
                    what they took; again whenever some rank has taken more than was known
==================  ================================================================================

Every rank plans with the same numbers, and so alike. Slices move between steps only.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from shardwise.errors import BudgetError, mismatch
from shardwise.residency import Needs, Pace, adapt, spare_bytes
from shardwise.residency import Tier as TierName
from shardwise.runtime.agreement import raise_together
from shardwise.runtime.divergence import explain
from shardwise.runtime.homes import Plan
from shardwise.runtime.limits import most
from shardwise.runtime.meter import Holding
from shardwise.runtime.state_slices import MASTER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from shardwise.residency import ChunkBytes, Limits
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.homes import ChunkShape
    from shardwise.runtime.meter import Meter
    from shardwise.runtime.mover import Mover

    ExpectedState = Mapping[Chunk, Mapping[str, torch.dtype]]

logger = logging.getLogger(__name__)

_ORDER = (
    (TierName.HOST, TierName.DISK),
    (TierName.ACCELERATOR, TierName.DISK),
    (TierName.ACCELERATOR, TierName.HOST),
    (TierName.HOST, TierName.ACCELERATOR),
    (TierName.DISK, TierName.ACCELERATOR),
    (TierName.DISK, TierName.HOST),
)
"""Ways of a move, those that make room for others first."""


class Follower(Protocol):
    """Adds state to chunks, and looks into slices of chunks."""

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """Look anew: the slices of some chunks have moved."""

    def expected_state(self) -> ExpectedState:
        """Return the slices of state that updates have or will make."""
        ...


class Adaptation:
    """Plans and changes the homes of one engine's chunks within the limits of the tiers."""

    def __init__(self, mover: Mover, limits: Limits) -> None:
        """Know nothing of a step yet."""
        self.keep_bytes: float = 0
        """Gathered bytes that the user wants to keep between forward and backward."""
        self.limits = limits
        """Of all ranks, once they have agreed."""
        self.plan: Plan | None = None
        self.needs = Needs()
        """What the accelerator holds beside slices, as far as it is known."""
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        """Asked, as long as they live, for the state that they need, and told what has moved."""
        self._mover = mover
        self._pace = Pace(holds_gradients=False)
        self.sizes: list[ChunkBytes] = []
        """Of all chunks, with the state that there is and will be."""
        self._state_bytes: list[int] = []
        """Of that state, as all ranks have agreed."""

    @property
    def has_limit(self) -> bool:
        """The bytes on the accelerator are limited."""
        return self.limits.accelerator_bytes is not None

    def first_plan(self, shapes: Sequence[ChunkShape]) -> Plan:
        """Return homes for new chunks. Raises ``BudgetError`` where nothing fits."""
        sizes, needs = self._sizes_of(shapes, [0] * len(shapes)), self._least_needs(shapes)
        return self._make_plan(shapes, sizes, needs)

    def adopt(self, plan: Plan) -> None:
        """Take the first plan as what is."""
        self.plan = plan
        self.sizes = self._sizes_of(plan.shapes, [0] * len(plan.shapes))
        self._state_bytes = [0] * len(plan.shapes)
        self.needs = self._least_needs(plan.shapes)

    def begin(self, engine: Engine) -> None:
        """Meter chunks that have just been packed."""
        engine.meter.cache_bytes = self.needs.gather_bytes
        self.note_slices(engine)
        engine.meter.reset()
        engine.meter.begin_step()

    def note_slices(self, engine: Engine) -> None:
        """Let the meter know of slices that were made or moved."""
        engine.meter.note_slices(self._mover.tiers.accelerator.allocated_bytes)

    def expect(self, engine: Engine, expected: ExpectedState) -> None:
        """Plan for state that an optimizer is about to add, and move what is in its way.

        Raises:
            BudgetError: There is no room, on all ranks alike; nothing was changed.

        Collectives: one all-reduce of a number per chunk and axis, and an agreement on moves.
        """
        state_bytes = most(self._own_state_bytes(engine, expected), engine.topology)
        sizes = self._sizes_with(engine, state_bytes)
        if sizes != self.sizes:
            self._change(engine, sizes, self.needs)
        self._state_bytes = state_bytes

    def before_update(self, engine: Engine) -> None:
        """Plan with what the passes since the last update have taken.

        Raises:
            BudgetError: It does not fit, on all ranks alike; nothing was changed.

        Collectives: one all-reduce of a few numbers per axis, where the accelerator has a limit.
        """
        if self.limits.accelerator_bytes is None:
            return
        self._plan_with_passes(engine)
        engine.meter.begin_step()  # not where it was refused: the same step would pass then

    def _plan_with_passes(self, engine: Engine) -> None:
        """Agree on what passes have taken and on state, and change homes where that has grown."""
        assert self.limits.accelerator_bytes is not None
        known_bytes, meter = self.needs.activation_bytes, engine.meter
        self.note_slices(engine)
        unseen_bytes = meter.unseen_bytes
        engine.whereabouts.note("agreement on memory")
        with explain(engine.whereabouts):
            # ranks without a piece of a chunk make no state there: all plan with the most
            lean_bytes, peak_bytes, *state_bytes = most(
                [
                    meter.lean_peak_bytes + unseen_bytes,
                    meter.step_peak_bytes + unseen_bytes,
                    *self._own_state_bytes(engine, {}),
                ],
                engine.topology,
            )
        needs, sizes = self.needs, self._sizes_with(engine, state_bytes)
        self._state_bytes = state_bytes
        if known_bytes is None or lean_bytes > known_bytes:
            needs = Needs(activation_bytes=lean_bytes)
        if needs is self.needs and sizes == self.sizes:
            return
        if known_bytes is not None and peak_bytes > self.limits.accelerator_bytes:
            logger.warning(
                "a pass took %d bytes, more of the accelerator than its limit of %d and than any "
                "pass before; slices make room from now on",
                peak_bytes,
                self.limits.accelerator_bytes,
            )
        self._change(engine, sizes, needs)

    def starter(self, engine: Engine) -> Callable[[], None]:
        """Return what starts over for an engine as long as it lives."""
        alive = weakref.ref(engine)

        def start() -> None:
            target = alive()
            if target is not None:
                self.start_over(target)

        return start

    def start_over(self, engine: Engine) -> None:
        """Before a pass that trains more than those before: leave as much room as can be.

        Ranks come here at moments of their own: below stage 3 some may have no pass at all.

        Raises:
            BudgetError: There is none, on all ranks alike; nothing was changed.

        Collectives: none.
        """
        if not self.has_limit:
            return
        own_bytes = self._own_state_bytes(engine, {})
        state_bytes = [max(pair) for pair in zip(self._state_bytes, own_bytes, strict=True)]
        needs = self._least_needs(self._shapes_of(engine))
        error = self._change(
            engine, self._sizes_with(engine, state_bytes), needs, is_together=False
        )
        if error is not None:
            raise error

    def refuse_whole(self, engine: Engine, chunks: Collection[Chunk]) -> None:
        """Refuse to keep chunks whole that do not all fit beside what is held now.

        Raises:
            BudgetError: On all ranks alike; nothing was gathered.

        Collectives: one all-reduce of two numbers per axis, where the accelerator has a limit.
        """
        limit_bytes = self.limits.accelerator_bytes
        if limit_bytes is None or self.plan is None:
            return
        kept = {chunk for chunk in engine.chunks if chunk.num_pins} | set(chunks)
        whole_bytes = sum(self.plan.shapes[chunk.index].whole_bytes for chunk in kept)
        self.note_slices(engine)
        held = engine.meter.held
        engine.whereabouts.note("agreement on memory")
        with explain(engine.whereabouts):
            own_bytes = sum(held.values()) - held[Holding.GATHERED]
            rest_bytes, other_bytes = most(
                [own_bytes, own_bytes - held[Holding.SLICES]], engine.topology
            )
        if whole_bytes + rest_bytes > limit_bytes:
            # with a higher limit slices move to the accelerator, all of them at most
            slice_bytes = sum(size.working_bytes + size.update_bytes for size in self.sizes)
            need_bytes = whole_bytes + other_bytes + slice_bytes
            raise BudgetError(
                mismatch(
                    "full_parameters",
                    expected=f"room for {whole_bytes} bytes of whole parameters on the accelerator",
                    got=f"{limit_bytes - rest_bytes} bytes",
                    where=f"{rest_bytes} of {limit_bytes} bytes are held on some rank",
                    fix=f"raise Budget.accelerator to {need_bytes} bytes, pass one module after "
                    "the other, or take state_dict(), which is on the CPU",
                )
            )

    def _change(
        self, engine: Engine, sizes: list[ChunkBytes], needs: Needs, *, is_together: bool = True
    ) -> Exception | None:
        """Make a plan and carry it out; return this rank's error where ranks come here apart."""
        plan = self._make_plan(self._shapes_of(engine), sizes, needs)
        engine.values.settle()
        error = self._carry_out(engine, plan)
        if is_together:
            raise_together(error, engine.topology)
        if error is not None:
            return error
        self.plan, self.sizes, self.needs = plan, sizes, needs
        spare = spare_bytes(sizes, plan.residency, limits=self.limits, needs=needs, pace=self._pace)
        is_measured = needs.activation_bytes is not None
        if engine.residence is not None and self.has_limit:
            engine.residence.gatherer.widen(max(0, spare or 0) if is_measured else 0)
        return None

    def _least_needs(self, shapes: Sequence[ChunkShape]) -> Needs:
        """Return what the accelerator holds beside slices as long as nothing was measured.

        Gathered chunks take the two largest bundles, or what the user wants to keep.
        """
        by_bundle: Counter[int] = Counter()
        for shape in shapes:
            if shape.is_sliced:
                by_bundle[shape.bundle] += shape.whole_bytes
        two_largest = sum(size for _, size in by_bundle.most_common(2))
        return Needs(
            resident_bytes=sum(shape.whole_bytes for shape in shapes if not shape.is_sliced),
            gather_bytes=int(max(two_largest, min(self.keep_bytes, by_bundle.total()))),
        )

    def _make_plan(
        self, shapes: Sequence[ChunkShape], sizes: list[ChunkBytes], needs: Needs
    ) -> Plan:
        """Return the homes that limits allow. Raises ``BudgetError`` where they allow none."""
        unused_home = TierName.ACCELERATOR
        if self.has_limit:
            unused_home = TierName.HOST if self.limits.disk_bytes == 0 else TierName.DISK
        return Plan(
            adapt(sizes, limits=self.limits, needs=needs, pace=self._pace),
            shapes,
            unused_home=unused_home,
            moves=True,
        )

    def _carry_out(self, engine: Engine, plan: Plan) -> Exception | None:
        """Move slices to their new homes, those first that make room for others."""
        ways: dict[Chunk, tuple[TierName, TierName]] = {}
        for chunk in engine.chunks:
            homes = (plan.state(chunk.index), plan.working(chunk.index))
            for slices, target in zip((chunk.own.state, chunk.own.working), homes, strict=True):
                source = target if slices is None else self._mover.name(slices.home)
                if source is not target:
                    ways.setdefault(chunk, (source, target))
        if ways and engine.residence is not None:
            engine.residence.gatherer.settle()  # slices of this rank may be on their way to others
        moved: list[Chunk] = []
        error: Exception | None = None
        try:
            for chunk in sorted(ways, key=lambda chunk: _ORDER.index(ways[chunk])):
                moved.append(chunk)
                self._move(chunk, plan, engine.meter)
                self.note_slices(engine)
        except Exception as failure:
            error = failure
        finally:  # also after an interrupt: what has moved has moved
            for follower in list(self.followers):
                follower.follow(moved)
        return error

    def _move(self, chunk: Chunk, plan: Plan, meter: Meter) -> None:
        """Give one chunk the homes of a plan."""
        chunk.own.move(
            working=self._mover.tier(plan.working(chunk.index)),
            state=self._mover.tier(plan.state(chunk.index)),
            is_beside_working=plan.is_together(chunk.index),
        )
        if chunk.own.gradient_S is not None and chunk.own.keeps_gradients_here:
            meter.watch(chunk.own.gradient_S, Holding.SLICES)

    def _shapes_of(self, engine: Engine) -> list[ChunkShape]:
        """Return the shapes of all chunks; some may have become trainable."""
        assert self.plan is not None
        return [
            replace(shape, is_trainable=shape.is_trainable or chunk.is_trainable)
            for chunk, shape in zip(engine.chunks, self.plan.shapes, strict=True)
        ]

    def _own_state_bytes(self, engine: Engine, expected: ExpectedState) -> list[int]:
        """Return the bytes of the state of all chunks that optimizers have or will have here."""
        everything = [expected, *(follower.expected_state() for follower in list(self.followers))]
        found = []
        for chunk in engine.chunks:
            dtypes = {} if chunk.own.state is None else chunk.own.state.dtypes()
            for state in everything:
                dtypes |= state.get(chunk, {})
            dtypes.pop(MASTER, None)
            found.append(sum(chunk.own.numel * dtype.itemsize for dtype in dtypes.values()))
        return found

    def _sizes_with(self, engine: Engine, state_bytes: Sequence[int]) -> list[ChunkBytes]:
        """Return the sizes of all chunks with the state that all ranks plan with."""
        return self._sizes_of(self._shapes_of(engine), state_bytes)

    def _sizes_of(
        self, shapes: Sequence[ChunkShape], state_bytes: Sequence[int]
    ) -> list[ChunkBytes]:
        """Return the sizes of chunks in the tiers that there are."""
        pairs = zip(shapes, state_bytes, strict=True)
        return [shape.sizes(size, tiers=self._mover.tiers) for shape, size in pairs]
