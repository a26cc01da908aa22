"""Give every rank the slices that the others have updated, and wait only where they are needed.

After ``publish`` a chunk's parameters are in flight. Where the model is known, each of them is
turned into an ``AwaitedParameter`` until it is first used: an operator that takes it waits for its
chunk, whatever module, tied weight or custom method the use comes from. From then on it is the
plain ``nn.Parameter`` it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.runtime.collectives import Channel, start_all_gather
from shardwise.runtime.managed import record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.topology import Axis


class AwaitedParameter(nn.Parameter):
    """A parameter whose values are still arriving; any use of them waits."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        """Wait for the chunks of every awaited argument unless only its description is read."""
        if func not in _DESCRIPTIONS:
            for parameter in _awaited(args):
                settle(parameter)
            for parameter in _awaited((kwargs or {}).values()):
                settle(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def settle(parameter: nn.Parameter) -> None:
    """Wait for the chunk of one parameter and make all its parameters plain again."""
    record = record_of(parameter)
    if record is None:  # a copy carries the class but is a tensor of its own
        _become(parameter, awaited=False)
        return
    settle_chunk(record.chunk)


def settle_chunk(chunk: Chunk) -> None:
    """Wait for one chunk; the values are new, so graphs that saved the old ones become invalid."""
    chunk.await_parameters()
    parameters = [record.parameter for record in chunk.records]
    for parameter in parameters:
        _become(parameter, awaited=False)
    torch.autograd.graph.increment_version(parameters)
    for record in chunk.records:
        record.seen_version = record.parameter._version


def publish(chunk: Chunk, axis: Axis, *, lazily: bool) -> None:
    """Start to gather a chunk that this rank has updated its slice of.

    Collectives: one all-gather, started here; all ranks publish the same chunks in the same order.

    Args:
        chunk: Its working slice holds the new values.
        axis: The shard axis.
        lazily: Let the first use of a parameter wait. Otherwise the caller calls ``settle_chunk``.
    """
    chunk.pending = start_all_gather(chunk.parameters_C, axis, Channel.GATHER_PARAMETERS)
    if not chunk.pending:
        settle_chunk(chunk)
        return
    if lazily:
        for record in chunk.records:
            _become(record.parameter, awaited=True)


def _become(parameter: nn.Parameter, *, awaited: bool) -> None:
    """Exchange the class of a parameter; subclasses of other libraries are left as they are."""
    before, after = nn.Parameter, AwaitedParameter
    if not awaited:
        before, after = after, before
    if type(parameter) is before:
        object.__setattr__(parameter, "__class__", after)


def _awaited(values: Iterable[Any]) -> list[AwaitedParameter]:
    """Return the awaited parameters among arguments, two levels of lists deep."""
    found: list[AwaitedParameter] = []
    for value in values:
        if type(value) is AwaitedParameter:
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_awaited(value))
        elif isinstance(value, dict):
            found.extend(_awaited(value.values()))
    return found


_T: Any = torch.Tensor
_DESCRIPTIONS: frozenset[Any] = frozenset(
    [
        *(
            getattr(_T, name).__get__
            for name in (
                "device",
                "dtype",
                "grad_fn",
                "is_cpu",
                "is_cuda",
                "is_leaf",
                "is_meta",
                "is_sparse",
                "layout",
                "ndim",
                "shape",
            )
        ),
        *(_T.requires_grad.__get__, _T.requires_grad.__set__),
        *(_T.grad.__get__, _T.grad.__set__, _T.grad.__delete__),
        *(_T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.is_contiguous),
        *(_T.is_floating_point, _T.is_complex, _T.element_size, _T.requires_grad_),
    ]
)
