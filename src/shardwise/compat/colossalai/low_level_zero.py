"""``LowLevelZeroOptimizer``: ZeRO-1/2 behind the signature that ColossalAI gave it.

It holds a ``ShardedOptimizer`` and adds what differs: gradients never show in ``parameter.grad``
after a synchronised pass, a step uses them up, and ``step`` inside ``no_sync`` does nothing.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardwise.compat.colossalai.settings import Arguments, make_set_up, rounded, working_dtype
from shardwise.compat.colossalai.wrapper import ShardedWrapper
from shardwise.errors import ConfigurationError, mismatch
from shardwise.optimizer.arguments import check_clip
from shardwise.optimizer.setup import set_up
from shardwise.optimizer.sharded import ShardedOptimizer
from shardwise.runtime.managed import record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    import torch.distributed as dist
    from torch import nn

    from shardwise.runtime.managed import ManagedParameter

logger = logging.getLogger(__name__)


class LowLevelZeroOptimizer(ShardedWrapper):
    """A torch optimizer whose state (stage 1), and gradients too (stage 2), are sharded over ranks.

    The optimizer is changed in place: its groups hold this rank's pieces. Give schedulers the
    original optimizer (``unwrap()``): it has the same groups. The first rank's parameters are given
    to all ranks.

    Args:
        optimizer: Any optimizer instance over the model's parameters.
        initial_scale: Loss scale of the first float16 step; like the next six arguments it is not
            looked at for other dtypes.
        min_scale: The scale never falls below it.
        growth_factor: The scale grows by it after ``growth_interval`` good steps.
        backoff_factor: The scale falls by it after ``hysteresis`` overflows.
        growth_interval: Good steps in a row before a growth.
        hysteresis: Overflows since the last growth before the scale falls.
        max_scale: The scale never rises above it.
        clip_grad_norm: Clip the global norm of gradients to it; 0 does not clip.
        verbose: Log skipped steps here as well.
        reduce_bucket_size: Elements that are reduced, and later gathered, together: the capacity of
            a chunk. A larger parameter is a chunk of its own. Numbers do not depend on it.
        communication_dtype: Dtype in which gradients are sent and added up over passes.
        overlap_communication: Without effect: reductions always run beside the backward pass.
        partition_grad: Shard gradients too (stage 2).
        cpu_offload: Keep masters and optimizer state in host memory. Parameters in host memory have
            them there either way; for others it is refused.
        dp_process_group: Ranks that train together; default all.
        sub_dp_size: Copies of the sharded state to keep: the group is cut into so many runs of
            consecutive ranks, which shard inside and replicate across.
        forced_dtype: Cast the parameters to it first; masters are the rounded values.
        master_weights: Update a float32 copy of 16-bit parameters.

    Raises:
        ConfigurationError: Before any parameter is changed.

    Collectives: a check, a broadcast per chunk, and the groups of ``sub_dp_size``, on the ranks of
    the group alone.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> adam = torch.optim.Adam(model.parameters())
        >>> optimizer = LowLevelZeroOptimizer(adam, partition_grad=True)
        >>> optimizer.backward(model(torch.ones(1, 4)).sum())
        >>> optimizer.step()
    """

    def __init__(  # noqa: PLR0913 - the signature that scripts were written for
        self,
        optimizer: torch.optim.Optimizer,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        reduce_bucket_size: int = 1024 * 1024,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        partition_grad: bool = False,
        cpu_offload: bool = False,
        dp_process_group: dist.ProcessGroup | None = None,
        sub_dp_size: int = 1,
        forced_dtype: torch.dtype | None = None,
        master_weights: bool = True,
    ) -> None:
        max_norm = check_clip(clip_grad_norm or None)
        scale = {
            "initial_scale": initial_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
        }
        arguments = Arguments(
            partition_grad=partition_grad,
            reduce_bucket_size=reduce_bucket_size,
            communication_dtype=communication_dtype,
            cpu_offload=cpu_offload,
            dp_process_group=dp_process_group,
            sub_dp_size=sub_dp_size,
            forced_dtype=forced_dtype,
            master_weights=master_weights,
            loss_scale=scale,
        )
        options = make_set_up(optimizer, arguments)
        self._forced_dtype = forced_dtype
        self._verbose = verbose
        with rounded([p for g in optimizer.param_groups for p in g["params"]], forced_dtype):
            binding = set_up(optimizer, options)
        self._dtype = working_dtype(optimizer, forced_dtype)
        wrapped = ShardedOptimizer.from_binding(optimizer, binding, options, max_norm)
        super().__init__(wrapped, binding)
        self._is_synchronising = True
        self._grad_norm: float | None = None
        self._nothing: dict[ManagedParameter, torch.Tensor] = {}

    # ------------------------------------------------------------------ one step

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Compute gradients of a scalar loss and, outside ``no_sync``, reduce them.

        Every parameter's ``.grad`` is None afterwards; under float16 the loss is scaled first.
        Collectives: as ``ShardedOptimizer.backward``.
        """
        self._sharded.backward(loss, retain_graph=retain_graph)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """As ``backward``, from a gradient of ``tensor`` that is already scaled."""
        self._sharded.backward_by_grad(tensor, grad)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update and use the gradients up; nothing inside ``no_sync``.

        A step with a gradient that is not finite on any rank is skipped on all.

        Collectives: as ``ShardedOptimizer.step``.
        """
        if not self._is_synchronising:
            return None
        loss = self._sharded.step(closure)
        self._grad_norm = self._sharded.grad_norm
        if self._verbose and self._sharded.last_step_skipped:
            logger.warning("found overflow, skipped step; loss scale %g", self._sharded.loss_scale)
        self._sharded.zero_grad()
        return loss

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate into ``parameter.grad`` on this rank alone; legal at both stages; nests."""
        before, self._is_synchronising = self._is_synchronising, False
        try:
            with self._sharded.no_sync():
                yield
        finally:
            self._is_synchronising = before

    # ------------------------------------------------------------------ what a user reads

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first working parameter."""
        return self._dtype

    @property
    def require_grad_sync(self) -> bool:
        """False inside ``no_sync``."""
        return self._is_synchronising

    def get_grad_norm(self, norm_type: float = 2.0) -> float | None:
        """Return the global norm of the last step before clipping; None before the first.

        Raises:
            ConfigurationError: Another norm than that of order 2 is asked for.
        """
        if norm_type != 2.0:
            raise ConfigurationError(
                mismatch(
                    "norm_type",
                    expected=2.0,
                    got=norm_type,
                    fix="call clip_grad_by_norm(inf, norm_type) before step()",
                )
            )
        return self._grad_norm

    def get_working_to_master_map(self) -> dict[int, torch.Tensor]:
        """Return ``id(parameter)`` -> what is updated for it here, over trainable parameters.

        A parameter of which this rank owns nothing has an empty tensor of its own.
        """
        return {id(parameter): master for parameter, master in self._masters()}

    def get_master_to_working_map(self) -> dict[int, nn.Parameter]:
        """Return the inverse: ``id(master)`` -> parameter."""
        return {id(master): parameter for parameter, master in self._masters()}

    def _masters(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield trainable parameters with their masters."""
        self._binding.refresh()
        for record in self._binding.records():
            if record.parameter.requires_grad:
                piece = self._binding.piece(record)
                if piece is None:
                    empty = torch.empty(0, dtype=record.chunk.own.update_dtype)
                    piece = self._nothing.setdefault(record, empty)
                yield record.parameter, piece

    # ------------------------------------------------------------------ groups, state, masters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it is cast and sharded like the others.

        Collectives: as for the constructor, without new groups.
        """
        given = param_group["params"]
        parameters = [given] if isinstance(given, torch.Tensor) else list(given)
        with rounded(parameters, self._forced_dtype):
            self._sharded.add_param_group({**param_group, "params": parameters})

    @torch.no_grad()
    def update_master_params(self, model: nn.Module) -> None:
        """Take the masters of the model's parameters from their working values.

        Needed after values were written behind autograd's back. Collectives: none.
        """
        mine = set(self._binding.records())
        for engine in self._binding.engines():
            engine.values.adopt_moved()
        for parameter in model.parameters():
            record = record_of(parameter)
            if record is not None and record in mine:
                record.chunk.own.refresh_master(record, keeps_exact=False)
                record.seen_version = parameter._version
