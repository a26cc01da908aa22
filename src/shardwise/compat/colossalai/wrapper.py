"""What sharded optimizers of the other library offer beside their step: groups, clipping, state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Never

import torch

from shardwise.errors import ShardwiseError, mismatch
from shardwise.optimizer.arguments import check_clip
from shardwise.shard import full_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from shardwise.optimizer.binding import Binding
    from shardwise.optimizer.sharded import ShardedOptimizer

MEBIBYTE = 2**20


class ShardedWrapper:
    """Abstract: a ``ShardedOptimizer`` held under the names of another library's wrapper."""

    def __init__(self, sharded: ShardedOptimizer, binding: Binding) -> None:
        """Hold an optimizer and what it is bound to."""
        self._sharded = sharded
        self._binding = binding

    # ------------------------------------------------------------------ groups

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The original optimizer."""
        return self._sharded.unwrap()

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the original optimizer."""
        return self._sharded.unwrap()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the original optimizer; writing to them takes effect."""
        return self._sharded.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the original optimizer."""
        return self._sharded.defaults

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What the original optimizer updates on this rank, over all groups."""
        return [tensor for group in self.param_groups for tensor in group["params"]]

    @property
    def num_param_groups(self) -> int:
        """Number of groups."""
        return len(self.param_groups)

    @property
    def loss_scale(self) -> float:
        """Scale of the next loss; 1 unless float16."""
        return self._sharded.loss_scale

    # ------------------------------------------------------------------ gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those already reduced too."""
        self._sharded.zero_grad(set_to_none=set_to_none)

    def get_param_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return the whole reduced gradient of a parameter, as ``shardwise.full_gradient``."""
        return full_gradient(param)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the reduced gradients to a global norm now; return the norm before.

        Raises:
            ShardwiseError: The norm is not finite and that was asked to be an error, on all ranks.

        Collectives: as ``ShardedOptimizer.clip_grad_norm_``.
        """
        norm = self._sharded.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise ShardwiseError(
                mismatch(
                    "gradient norm",
                    expected="a finite number",
                    got=norm.item(),
                    fix="call step(), which skips it, or zero_grad()",
                )
            )
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Limit every element of the reduced gradients to ``[-clip_value, clip_value]`` now.

        Gradients that are not finite are left for ``step`` to skip. Collectives: as
        ``clip_grad_by_norm``.
        """
        limit = check_clip(clip_value)
        gradients = self._sharded._gradients
        gradients.settle()
        largest, divisors = gradients.measure(math.inf)
        if limit is not None and math.isfinite(largest):
            with torch.no_grad():
                gradients.clamp_(limit, divisors)

    def scale_loss(self, loss: torch.Tensor) -> Never:
        """Refuse: only ``backward`` knows which scale a step began with."""
        raise _unsupported("scale_loss")

    def unscale_grad(self) -> Never:
        """Refuse: ``step`` divides by the scale, in float32."""
        raise _unsupported("unscale_grad")

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in torch's format, on the CPU of every rank.

        It loads into a plain optimizer, and here at any number of ranks. Masters and loss scale are
        added under ``"shardwise"``. Collectives: as ``ShardedOptimizer.state_dict``.
        """
        return self._sharded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, from ``state_dict`` or from a plain optimizer. Collectives: none."""
        self._sharded.load_state_dict(state_dict)

    def state_dict_shard(
        self, max_shard_size: float = 1024
    ) -> Iterator[tuple[dict[int, dict[str, Any]], int]]:
        """Yield ``(part of state_dict()["state"], its bytes)``, each part at most this large.

        A parameter whose state is larger is a part of its own.

        Args:
            max_shard_size: MiB.

        Collectives: as ``state_dict``, spread over the iteration: all ranks iterate to the end.
        """
        for part in self._sharded.state_dict_shards(int(max_shard_size * MEBIBYTE)):
            yield (
                part,
                sum(
                    value.numel() * value.element_size()
                    for state in part.values()
                    for value in state.values()
                    if isinstance(value, torch.Tensor)
                ),
            )


def _unsupported(name: str) -> ShardwiseError:
    """Return the error of a call that has no meaning here."""
    return ShardwiseError(
        mismatch(
            name,
            expected="backward(loss), which scales, and step(), which unscales",
            got="a call by hand",
            fix="drop the call",
        )
    )
