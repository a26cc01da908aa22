"""Turn gradients that autograd produces into reduced slices, beside the backward pass.

Life of one backward pass on one rank::

    before(p)   AccumulateGrad is about to run: take the stand-in out of p.grad
    after(p)    copy p.grad into its slot; when a chunk is full and all chunks before it in the
                issue order were sent, send it (chunks are sent in one order on every rank)
    finish()    agree on what was used and sent anywhere; send the rest with zeros for what did not
                come; wait; mark what is held

A gradient that comes after its chunk was sent (recompute of a shared parameter) is kept aside and
reduced in a second round that all ranks agree on.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from shardwise.runtime import facts, refusals
from shardwise.runtime.absent import describing
from shardwise.runtime.agreement import Verdict, agree
from shardwise.runtime.collectives import is_pairwise
from shardwise.runtime.divergence import explain
from shardwise.runtime.gradient_hooks import GradientHooks
from shardwise.runtime.intake import GradientIntake
from shardwise.runtime.lockstep import Lockstep
from shardwise.runtime.placeholder import ShardedGradient
from shardwise.runtime.worker import Executor, LaggedExecutor, ThreadExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.divergence import Whereabouts
    from shardwise.runtime.managed import ManagedParameter
    from shardwise.runtime.reduction import Reduction
    from shardwise.runtime.topology import Topology

OUTSIDE_BACKWARD = -1
UNSCALED = "the loss of a float16 model must be scaled"


class Phase(Enum):
    """Where the reducer stands."""

    IDLE = "no backward pass is open"
    OPEN = "gradients of a backward pass have arrived and were not finished"


class GradientReducer:
    """Hooks on parameters, the counters behind them, and the order of reductions."""

    def __init__(
        self,
        records: Sequence[ManagedParameter],
        chunks: Sequence[Chunk],
        topology: Topology,
        *,
        reduction: Reduction,
        leaves_stand_ins: bool = True,
        whereabouts: Whereabouts,
    ) -> None:
        """Watch every trainable parameter."""
        self.records = list(records)
        self.chunks = list(reversed(chunks))
        """All chunks in the order in which they are sent."""
        self.topology = topology
        self.reduction = reduction
        self.is_synchronising = True
        """False inside no_sync."""
        self.bare_backward_refusal: str | None = None
        """Why ``loss.backward()`` must be ``optimizer.backward(loss)``; None where it need not."""
        self.is_weighted = False
        """Gradients of this step are sums that weights will divide."""
        self.on_weighted: Callable[[], None] = lambda: None
        """Called when a pass that some rank has weighted is completed here."""
        self.on_more_trained: Callable[[], None] = lambda: None
        """Called before parameters of chunks are watched that were frozen until now."""
        self.on_end: Callable[[], None] = lambda: None
        """Called at the end of every backward pass, reduced or not."""
        self.on_send: Callable[[Chunk], None] = lambda chunk: None
        """Called when all gradients of a chunk are there."""
        self._leaves_stand_ins = leaves_stand_ins
        self._intake = GradientIntake(reduction, leaves_stand_ins=leaves_stand_ins)
        self._whereabouts = whereabouts
        self._phase = Phase.IDLE
        self._is_explicit = False
        self._callback_task = OUTSIDE_BACKWARD
        self._next = 0
        self._order: list[Chunk] = []
        device = topology.device
        axis = topology.shard if topology.shard.group is not None else topology.replicate
        threaded = axis.group is not None and is_pairwise(axis, device)
        is_frugal = reduction.pool.is_frugal
        self._executor: Executor = LaggedExecutor(lag=1 if is_frugal else 2)
        if threaded and not is_frugal:
            self._executor = ThreadExecutor()
        self._lockstep = Lockstep(topology, whereabouts, is_on=threaded and is_frugal)
        self._hooks = GradientHooks(self._before, self._after)
        self.watch()

    def watch(self) -> None:
        """Hook parameters that became trainable, or lost their hooks."""
        if any(not chunk.own.is_updated and chunk.is_trainable for chunk in self.chunks):
            self.on_more_trained()
        fresh = self._hooks.watch(self.records)
        for record in fresh:
            if record.parameter.dtype is torch.float16 and self.bare_backward_refusal is None:
                self.bare_backward_refusal = UNSCALED

    def forget(self, record: ManagedParameter) -> None:
        """Hook a parameter anew before the next backward pass."""
        self._hooks.forget(record)

    @property
    def is_open(self) -> bool:
        """True when a backward pass has started and was not finished."""
        return self._phase is Phase.OPEN

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Let go of parameters (nodes that own them are hidden from Python) and of the thread.

        ``then`` is called when no gradient is on its way any more, maybe on another thread.
        """
        self._hooks.close()
        self._executor.close(then)

    # ------------------------------------------------------------------ the backward pass

    def backward(self, run: Callable[[], None]) -> None:
        """Run one backward pass and finish it, whatever nesting of graphs it contains.

        Collectives: those of ``finish``. After an error nothing of any earlier gradient is trusted;
        ``reset`` (zero_grad) makes the next pass a fresh one.
        """
        self._refuse_if_broken()
        self.watch()
        self._is_explicit = True
        try:
            run()
            if self.is_synchronising:
                self.finish()
        finally:
            self._is_explicit = False
            self.on_end()

    def note_backward(self, _: torch.Tensor) -> None:
        """Learn from the model's output that its outermost backward pass has begun."""
        task = torch._C._current_graph_task_id()
        if not self._is_explicit and self._callback_task != task:
            self._callback_task = task
            Variable._execution_engine.queue_callback(self._finish_if_open)

    @describing
    def _before(self, record: ManagedParameter, _: object) -> None:
        """Make room in ``parameter.grad``."""
        if self.bare_backward_refusal is not None and not self._is_explicit:
            raise refusals.bare_backward(record, self.bare_backward_refusal)
        parameter = record.parameter
        if self.is_synchronising and self._phase is Phase.IDLE:
            self._open()
        elif not self.is_synchronising and record.is_assigned:
            self._intake.adopt(record)
        if isinstance(parameter.grad, ShardedGradient):
            parameter.grad = None
            return
        is_removed = parameter.grad is None and record.is_held and not record.has_arrived
        if is_removed and self._leaves_stand_ins:
            record.drop_gradient()

    @describing
    def _after(self, record: ManagedParameter, parameter: torch.Tensor) -> None:
        """Take the gradient that autograd has just finished."""
        if parameter.dtype != record.chunk.dtype:
            raise refusals.cast_parameter(record)
        if not self.is_synchronising:
            self._intake.keep_local(record)
        else:
            if self._phase is Phase.IDLE:
                self._open()
            self._intake.absorb(record)
            self._send_ready()

    @describing
    def _open(self) -> None:
        """Start counting for a new backward pass; all ranks where they wait inside of it."""
        self._lockstep.begin()
        self._count()

    @describing
    def _count(self) -> None:
        """Start counting."""
        self._phase = Phase.OPEN
        self._next = 0
        self.drop_removed()
        for record in self.records:
            if record.is_assigned:
                self._intake.adopt(record)
        for chunk in self.chunks:
            chunk.is_sent = False
            chunk.num_missing = 0
            for record in chunk.records:
                record.has_arrived = False
                chunk.num_missing += record.is_expected and record.parameter.requires_grad
        self._order = [chunk for chunk in self.chunks if chunk.num_missing]
        if not self._is_explicit and self._callback_task == OUTSIDE_BACKWARD:
            self._callback_task = torch._C._current_graph_task_id()
            if self._callback_task != OUTSIDE_BACKWARD:
                Variable._execution_engine.queue_callback(self._finish_if_open)

    @describing
    def drop_removed(self) -> None:
        """Forget reduced gradients whose stand-in the user has removed."""
        for record in self.records:
            if self._leaves_stand_ins and record.is_held and record.parameter.grad is None:
                record.drop_gradient()

    def _send_ready(self) -> None:
        """Send the chunks that are full, as far as the issue order allows."""
        while self._next < len(self._order) and self._order[self._next].num_missing <= 0:
            self._send(self._order[self._next])
            self._next += 1

    def _send(self, chunk: Chunk) -> None:
        """Start the reduction of one chunk."""
        chunk.is_sent = True
        self.on_send(chunk)
        self._executor.submit(self.reduction.start(chunk))

    # ------------------------------------------------------------------ the end of it

    def _finish_if_open(self) -> None:
        """End a pass that ``loss.backward()`` began."""
        self._callback_task = OUTSIDE_BACKWARD
        if self._is_explicit:
            return
        if self._phase is Phase.OPEN:
            self.finish()
        self.on_end()

    def finish(self) -> None:
        """Complete the reductions of a backward pass on all ranks.

        Collectives: an agreement, and a reduce-scatter per chunk that some rank used.
        """
        if self._phase is Phase.IDLE:
            self._open()
        self._finish()

    def _finish(self) -> None:
        """Complete what was opened."""
        self._absorb_local()
        if self._lockstep.is_on:
            for chunk in self._order:  # others may wait for it
                if not chunk.is_sent:
                    self._send(chunk)
        self._complete(self._agree(is_finishing=True))

    def settle(self) -> None:
        """Before a step: reduce what no_sync left, take part in what others still reduce.

        Gradients that the user removed (``parameter.grad = None``) on any rank are dropped on all.
        Collectives: an agreement; those of ``finish`` where some rank has gradients left.
        """
        self._refuse_if_broken()
        self.watch()  # also on a rank that had no pass
        if self._has_local_gradients():
            self.finish()
        while self._lockstep.must_join():
            self._count()
            self._finish()
        while (verdict := self._agree(is_finishing=False)).is_finishing:
            self._complete(verdict)
        self._whereabouts.step += 1
        if verdict.mask:
            self._intake.drop(r for r in self.records if verdict.mask >> r.index & 1)

    @describing
    def _has_local_gradients(self) -> bool:
        """Return whether gradients of this rank alone wait to be reduced."""
        return any(record.has_local_gradient for record in self.records)

    def reset(self) -> None:
        """Forget an unfinished backward pass and return to a state in which the next is fresh."""
        if self._phase is Phase.OPEN:
            with suppress(RuntimeError):  # results are thrown away, errors of peers with them
                self._executor.drain()
            self._close()
            for record in self.records:
                record.late = record.local = None
                record.is_held = False
            for chunk in self.chunks:
                self.reduction.release(chunk)
        self._callback_task = OUTSIDE_BACKWARD
        self._is_explicit = False

    def _refuse_if_broken(self) -> None:
        """Raise when an earlier backward pass never ended."""
        if self._phase is Phase.OPEN and torch._C._current_graph_task_id() == OUTSIDE_BACKWARD:
            raise refusals.unfinished_backward("gradients")

    @describing
    def _absorb_local(self) -> None:
        """Take gradients that came without a hook or under no_sync and were not touched since."""
        self.watch()
        for record in self.records:
            if record.has_local_gradient:
                self._intake.absorb(record)

    @describing
    def _agree(self, *, is_finishing: bool) -> Verdict:
        """Tell the other ranks what came and was sent; at a step, what the user has removed."""
        finishing_mask, step_mask = None, 0
        if is_finishing:
            finishing_mask = facts.collect(self.records, self.chunks, is_weighted=self.is_weighted)
        elif self._leaves_stand_ins:
            for record in self.records:
                step_mask |= (record.is_held and record.parameter.grad is None) << record.index
        self._whereabouts.note("end of a backward pass" if is_finishing else "start of a step")
        with explain(self._whereabouts):
            verdict = agree(
                self.topology,
                num_bits=facts.num_bits(self.records, self.chunks),
                finishing_mask=finishing_mask,
                step_mask=step_mask,
                order_print=self._whereabouts.gathered_print,
            )
        if not verdict.is_same_order:
            raise self._whereabouts.other_order()
        self._whereabouts.forget_gathers()
        return verdict

    @describing
    def _complete(self, verdict: Verdict) -> None:
        """Send what is left of an agreed backward pass, wait, and mark what is held."""
        if self._phase is Phase.IDLE:
            self._count()
        said = facts.read(verdict.mask, self.records, self.chunks)
        is_mixed = said.is_weighted and said.is_unweighted
        if said.is_weighted and not is_mixed:
            self.on_weighted()
        facts.learn(said, self.chunks)
        self._intake.drop(r for r in said.replaced if not r.is_replaced and not r.chunk.is_sent)
        # first what some rank has sent eagerly, in that order
        rest = [chunk for chunk in self.chunks if chunk not in self._order]
        for chunk in [*self._order, *rest]:
            is_wanted = chunk in said.sent or not said.used.isdisjoint(chunk.records)
            if is_wanted and not chunk.is_sent:
                self._send(chunk)
        self._drain()
        if is_mixed:  # not before: what some rank has sent must be received
            raise refusals.mixed_weights()
        self._send_late(said.late)
        for record in said.used | said.late:
            record.is_held = True
            record.is_zero = record.is_spent = False
            self._intake.show_stand_in(record)
        if said.used:
            for record in self.records:
                record.is_expected = record in said.used
        self._close()

    def _send_late(self, late: frozenset[ManagedParameter]) -> None:
        """Reduce the chunks of late gradients once more, with those alone."""
        for chunk in self.chunks:
            if late.isdisjoint(chunk.records):
                continue
            for record in chunk.records:
                record.has_arrived = record.late is not None
                if record.late is not None:
                    record.view_in(self.reduction.buffer(chunk)).copy_(record.late)
                    record.late = None
            self._send(chunk)
        self._drain()

    def _drain(self) -> None:
        """Wait for the reductions that were started."""
        self._whereabouts.note("wait for reductions")
        with explain(self._whereabouts):
            self._executor.drain()

    def _close(self) -> None:
        """Leave the backward pass."""
        self._phase = Phase.IDLE
        for chunk in self.chunks:
            chunk.is_sent = False
        for record in self.records:
            record.has_arrived = record.is_replaced = False
        self.reduction.end_pass()
