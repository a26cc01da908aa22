"""What stands in ``parameter.grad`` while the reduced gradient lies in slices.

It has the parameter's shape, dtype and device and holds no bytes. Setting ``parameter.grad`` to
None or calling ``module.zero_grad()`` acts on the real gradient, as in plain PyTorch; everything
that would need the values raises and names the call that has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.runtime.managed import ManagedParameter

_aten = torch.ops.aten


class ShardedGradient(torch.Tensor):
    """Stand-in for a gradient of which every rank holds a slice."""

    _record: ManagedParameter

    @staticmethod
    def __new__(cls: type[ShardedGradient], record: ManagedParameter) -> ShardedGradient:
        """Take shape, strides, dtype and device from the parameter."""
        parameter = record.parameter
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=record.stride if parameter.shape == record.shape else parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self._record = record
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Name the parameter: there are no values to show."""
        return f"ShardedGradient({self._record.name!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore [bad-override] - torch calls it with func first
        cls,
        func: Any,  # noqa: ANN401 - an operator overload
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> ShardedGradient:
        """Support what ``zero_grad`` does; refuse the rest by name."""
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], ShardedGradient):
            return handler(args[0])
        names = [arg._record.name for arg in _flatten(args) if isinstance(arg, ShardedGradient)]
        raise ShardwiseError(
            mismatch(
                f"{func}",
                expected="a gradient that lies whole on this rank",
                got="one that is sharded over the ranks",
                where=", ".join(names),
                fix="clip with optimizer.clip_grad_norm_(), read with shardwise.full_gradient() "
                "and update with shardwise.ShardedOptimizer",
            )
        )


def _zero(handle: ShardedGradient) -> ShardedGradient:
    """Zero the reduced gradient and keep it in use."""
    handle._record.zero_gradient()
    return handle


def _same(handle: ShardedGradient) -> ShardedGradient:
    """Return the stand-in itself."""
    return handle


_HANDLERS: dict[Any, Callable[[ShardedGradient], ShardedGradient]] = {
    _aten.zero_.default: _zero,
    _aten.detach_.default: _same,
    _aten.detach.default: _same,
}


def _flatten(values: Sequence[Any]) -> list[Any]:
    """Return arguments with lists and tuples opened one level."""
    flat: list[Any] = []
    for value in values:
        flat.extend(value if isinstance(value, list | tuple) else [value])
    return flat
