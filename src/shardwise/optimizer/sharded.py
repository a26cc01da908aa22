"""The public optimizer: plain torch outside, pieces of chunks inside.

Life of a step: settle (finish what is not reduced) -> measure (norm, finiteness, weights) -> skip,
or update chunk by chunk (``stepping``) while updated chunks travel (``runtime.publisher``).
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardwise.optimizer.accounting import held_storages
from shardwise.optimizer.arguments import (
    check_clip,
    check_dict,
    check_loss,
    check_shard_bytes,
    copy_refusal,
)
from shardwise.optimizer.gradients import Gradients, clip_coefficient
from shardwise.optimizer.setup import SetUp, bind_group, set_up
from shardwise.optimizer.state import StateExchange
from shardwise.optimizer.stepping import Stepper
from shardwise.optimizer.update_gradient import Factors
from shardwise.options import HALF_DTYPES, AdaptiveOffload, LossScale, MixedPrecision, StaticOffload
from shardwise.runtime.loss_scaling import LossScaler
from shardwise.runtime.norms import check_norm_type

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.optimizer.atoms import Atom
    from shardwise.optimizer.binding import Binding

logger = logging.getLogger(__name__)


class ShardedOptimizer(torch.optim.Optimizer):
    """Any ``torch.optim`` optimizer, run on the pieces of parameters that this rank owns.

    It shares the wrapped optimizer's ``param_groups`` dicts and ``state``, so schedulers made
    before or after act on both. For parameters of a module that ``shard`` was called on everything
    comes from there. Otherwise ``stage`` is required and the parameters are sharded here, without
    touching the model's modules: the ZeRO-1/2 optimizer.

    Args:
        optimizer: An instance; it is changed in place. State that it already has is sharded.
        stage: 0, 1 or 2, for parameters that are not sharded yet.
        mesh: As in ``shard``, for parameters that are not sharded yet.
        shard_size: As in ``shard``, for parameters that are not sharded yet.
        clip_grad_norm: Clip the global gradient norm to this at every step.
        norm_type: The p of that norm, positive or inf.
        mixed_precision: As in ``shard``, for parameters that are not sharded yet.
        chunk_bytes: As in ``shard``, for parameters that are not sharded yet.
        offload: As in ``shard``, for parameters that are not sharded yet.
        atom: What a cut over ranks may not split: "element", "parameter" or a number of elements.
            Default: "parameter" for Muon and Adafactor, else "element".

    Raises:
        ConfigurationError: Before anything is changed, on all ranks alike.

    Collectives: an agreement where state rests elsewhere; those of ``shard`` for other parameters.

    Example:
        >>> import torch, shardwise as sw
        >>> model = sw.shard(torch.nn.Linear(4, 1), stage=2)
        >>> optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer.backward(model(torch.ones(2, 4)).mean())
        >>> optimizer.step()
        >>> optimizer.grad_norm > 0
        True

    Source: Rajbhandari et al., ZeRO, 2020, sections 5.1 and 5.2.
    """

    def __init__(  # noqa: PLR0913 - the public face, all by keyword
        self,
        optimizer: torch.optim.Optimizer,
        *,
        stage: int | None = None,
        mesh: DeviceMesh | None = None,
        shard_size: int | None = None,
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
        mixed_precision: MixedPrecision | None = None,
        chunk_bytes: int | None = None,
        offload: StaticOffload | AdaptiveOffload | None = None,
        atom: Atom | None = None,
    ) -> None:
        self._max_norm = check_clip(clip_grad_norm)
        self._norm_type = check_norm_type(norm_type)
        options = SetUp(
            stage=stage,
            mesh=mesh,
            shard_size=shard_size,
            mixed_precision=mixed_precision,
            chunk_bytes=chunk_bytes,
            offload=offload,
            atom=atom,
        )
        self._become(optimizer, set_up(optimizer, options), options)

    @classmethod
    def from_binding(
        cls, inner: torch.optim.Optimizer, binding: Binding, options: SetUp, max_norm: float | None
    ) -> ShardedOptimizer:
        """Wrap what ``set_up`` has bound: for faces with settings that the constructor lacks."""
        self = cls.__new__(cls)
        self._max_norm, self._norm_type = check_clip(max_norm), options.norm_type
        self._become(inner, binding, options)
        return self

    def _become(self, inner: torch.optim.Optimizer, binding: Binding, options: SetUp) -> None:
        """Take over the wrapped optimizer's groups and state."""
        self._is_ready = False
        super().__init__(inner.param_groups, inner.defaults)
        self._is_ready = True
        earlier = inner.state_dict() if inner.state else None
        inner.state.clear()
        self._inner = inner
        self._set_up = options
        self._binding = binding
        binding.refresh()
        self._stepper = Stepper(inner, binding)
        self._share()
        binding.serve(self)
        precisions = (engine.precision for engine in binding.engines())
        precision = next((one for one in precisions if one is not None), None)
        scale = options.loss_scale or (precision.loss_scale if precision else LossScale())
        self._gradients = Gradients(binding, LossScaler(scale))
        self.last_step_skipped = False
        self._norm: float = 0.0
        self._clipped_norm: float | None = None
        if earlier is not None:
            self.load_state_dict(earlier)

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        """Refuse."""
        raise copy_refusal("copy.deepcopy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickling."""
        raise copy_refusal("pickle")

    def _share(self) -> None:
        """Show the wrapped optimizer's groups and state as one's own."""
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state
        self.defaults = self._inner.defaults

    # ------------------------------------------------------------------ what a user reads

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last step, before clipping; inf or nan if it was skipped.

        Between ``clip_grad_norm_`` and the step it clips for: the norm before the first clipping.
        """
        return self._norm

    @property
    def loss_scale(self) -> float:
        """Scale of the next loss; 1.0 unless gradients are float16."""
        scaler = self._gradients.scaler
        return 1.0 if scaler is None else scaler.scale

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer."""
        return self._inner

    def held_storages(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that this rank holds, by purpose, for accounting."""
        return held_storages(self._inner, self._binding)

    # ------------------------------------------------------------------ gradients

    def backward(
        self, loss: torch.Tensor, *, weight: float | None = None, retain_graph: bool = False
    ) -> None:
        """Compute and reduce gradients of a scalar loss.

        Args:
            loss: A scalar on this rank; multiplied by the loss scale under float16.
            weight: For a loss that is a *sum*: over how many tokens (or samples). At ``step``
                gradients are divided by the sum of all weights over ranks and micro-batches.
            retain_graph: As in torch.

        Raises:
            ConfigurationError: The weight is negative or not finite.
            ShardwiseError: Weighted and unweighted passes are mixed in one step.

        Collectives: a reduce-scatter per chunk, begun during the pass, and one agreement; none
        inside ``no_sync``.
        """
        check_loss(loss)
        scale = self._gradients.begin(weight)
        wide = loss.float() if loss.dtype in HALF_DTYPES else loss
        scaled = loss if scale == 1.0 else wide * scale
        self._clipped_norm = None
        self._gradients.run(partial(scaled.backward, retain_graph=retain_graph))

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Compute and reduce gradients from a gradient of ``tensor`` that came from elsewhere.

        Args:
            tensor: Output of a pipeline stage, any shape.
            grad: Its gradient, already multiplied by this optimizer's loss scale.

        Collectives: as ``backward``.
        """
        self._gradients.begin(None)
        self._clipped_norm = None
        self._gradients.run(partial(torch.autograd.backward, tensor, grad))

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate gradients on this rank alone, as ``shardwise.no_sync``; nests."""
        with ExitStack() as stack:
            for engine in self._binding.engines():
                stack.enter_context(engine.no_sync())
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this optimizer's parameters, reduced or not.

        Also recovers from a backward pass that ended in an error. Args as in torch.
        """
        self._clipped_norm = None
        self._gradients.clear(set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``, as torch does.

        Returns:
            The norm before clipping, a 0-dim float32 tensor, equal on all ranks.

        Collectives: those of ``step`` before its update.
        """
        order = check_norm_type(norm_type)
        limit = check_clip(max_norm)
        self._gradients.settle()
        norm, _ = self._gradients.measure(order)
        if limit is not None and math.isfinite(norm):
            with torch.no_grad():
                self._gradients.multiply_(clip_coefficient(norm, limit))
        if self._clipped_norm is None:
            self._norm = self._clipped_norm = norm
        return torch.tensor(norm, dtype=torch.float32)

    # ------------------------------------------------------------------ the update

    @torch.no_grad()
    def step(  # pyrefly: ignore [bad-override] - torch declares overloads of this one
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that some rank has a gradient for.

        A step with a non-finite gradient on any rank is skipped on all: parameters, masters and
        state keep every bit, gradients are dropped, ``last_step_skipped`` is True. Under float16
        the loss scale follows.

        Args:
            closure: Run first, with gradients enabled; its result is returned.

        Raises:
            ShardwiseError: Inside ``no_sync``, or after a backward pass that ended in an error.

        Collectives: an agreement, the norm, and an all-gather per updated chunk, which the first
        use of its parameters waits for.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gradients.settle()
        self._gradients.make_room()
        self.last_step_skipped = False
        norm, divisors = self._gradients.measure(self._norm_type)
        self._norm = norm if self._clipped_norm is None else self._clipped_norm
        overflowed = not math.isfinite(norm) or any(d == 0 for d in divisors.values())
        scaler = self._gradients.scaler
        if scaler is not None and self._gradients.exist():
            scaler.update(overflowed=overflowed)
        if overflowed:
            self._skip(norm, has_weight=all(divisors.values()))
            return loss
        coefficient = 1.0 if self._max_norm is None else clip_coefficient(norm, self._max_norm)
        self._gradients.scale_left_out_(divisors, coefficient)
        self._binding.refresh()
        try:
            self._stepper.step(Factors(divisors, coefficient))
        finally:
            for engine in divisors:
                engine.end_step()
                if not engine.options.knows_model:
                    engine.values.settle()
        return loss

    def _skip(self, norm: float, *, has_weight: bool) -> None:
        """Leave everything as it was and drop the gradients."""
        self.last_step_skipped = True
        logger.warning(
            "step skipped: %s%s",
            f"the global gradient norm is {norm}" if has_weight else "the global weight is 0",
            "" if self._gradients.scaler is None else f"; loss scale is now {self.loss_scale:g}",
        )
        self.zero_grad()
        self._gradients.end_step()

    # ------------------------------------------------------------------ groups, state, masters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch; its parameters are sharded like the others.

        Raises ``ConfigurationError`` for a parameter that is in a group, or in no sharded module.
        Collectives: those of ``shard`` where the parameters are not sharded yet.
        """
        if not self._is_ready:
            super().add_param_group(param_group)
            return
        bind_group(self._inner, self._binding, param_group, self._set_up)
        self._binding.serve(self)
        self._binding.refresh()
        self._share()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in the format of the wrapped optimizer, on every rank.

        ``state`` is keyed by parameter index, with CPU tensors of the parameters' shapes, and loads
        into a plain optimizer. Loss scaling and float32 masters, where they exist, are added under
        ``"shardwise"``, which plain optimizers ignore.

        Collectives: one exchange of names, one all-gather per chunk and state tensor.
        """
        with self._binding.during("state_dict() of the optimizer"):
            return self._exchange().full()

    def state_dict_shards(self, max_shard_bytes: int) -> Iterator[dict[int, dict[str, Any]]]:
        """Yield ``state`` of ``state_dict`` in parts, each at most this large.

        A part that holds one parameter alone may be larger. Collectives: as ``state_dict``, spread
        over the iteration: all ranks must iterate to the end.
        """
        return self._exchange().in_shards(check_shard_bytes(max_shard_bytes))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state: from ``state_dict`` at any world size, or from a plain optimizer.

        Raises:
            ConfigurationError: Groups or shapes do not match; nothing is changed.
        """
        check_dict("load_state_dict", state_dict, fix="pass what state_dict() returned")
        for engine in self._binding.engines():
            engine.values.settle()
            engine.reducer.watch()
        self._binding.refresh()
        groups = self._inner.param_groups
        local = self._exchange().localise(state_dict)
        self._inner.load_state_dict(local)
        for kept, loaded in zip(groups, self._inner.param_groups, strict=True):
            kept.clear()
            kept.update(loaded)
        self._inner.param_groups = groups
        self._share()
        extra = state_dict.get("shardwise", {})
        scaler = self._gradients.scaler
        if scaler is not None and extra.get("loss_scaler") is not None:
            scaler.load_state_dict(extra["loss_scaler"])
        self._exchange().finish_load(extra.get("masters", {}))

    def _exchange(self) -> StateExchange:
        """Return the translator between pieces and whole state."""
        return StateExchange(self._inner, self._binding, self._gradients.scaler)

    def refresh_master_parameters(self) -> None:
        """Take float32 masters from the working parameters.

        Needed after writes behind autograd's back (``parameter.data``); others are noticed by the
        next step. Collectives: none.
        """
        with torch.no_grad():
            for engine in self._binding.engines():
                engine.values.settle()
                engine.values.adopt_moved()
                engine.values.refresh_masters(engine.records, keeps_exact=False)
