"""Parameters whose values are not on this rank at the moment.

Such a parameter is re-classed to a subclass whose operators ask its engine to bring the values
first; when they are there it is the plain ``nn.Parameter`` it was, at no cost. Reading what needs
no values (``shape``, ``grad``, ...) asks for nothing. What "bring" does, waits or refuses, is the
engine's matter.
"""

from __future__ import annotations

import copy
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import nn

from shardwise.errors import ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.runtime.chunk import Chunk

ParametersT = ParamSpec("ParametersT")
ReturnT = TypeVar("ReturnT")

ATTRIBUTE = "_shardwise"
"""The one attribute that the library stores on a user's tensor: see ``managed``."""


class Absent:
    """What a parameter without values does: an operator that takes it brings them."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        """Bring the values of every absent argument unless only its description is read."""
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _CASTS and _changes_nothing(func, *args, **(kwargs or {})):
            return args[0]
        if func == _SET_DATA and args[0] is args[1]:
            return None
        if func is torch.Tensor.copy_ and _takes_pieces(args[0]):
            return _write(*args, **(kwargs or {}))
        pinned: list[Chunk] = []
        try:
            for parameter in _parameters_in((args, kwargs or {})):
                _pin(parameter, func, pinned)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        finally:
            for chunk in pinned:
                chunk.num_pins -= 1

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Describe the parameter: reading it for the sake of printing would be collective."""
        record = getattr(self, ATTRIBUTE)
        return (
            f"AbsentParameter({record.name!r}, shape={tuple(record.parameter.shape)}, "
            f"dtype={record.parameter.dtype})"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Any:  # noqa: ANN401 - as torch's
        """Copy the values when they are brought by that; otherwise refuse."""
        _bring(self, copy_refusal)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, proto: Any) -> Any:  # noqa: ANN401 - as torch's
        """Pickle the values when they are brought by that; otherwise refuse."""
        _bring(self, copy_refusal)
        return type(self).__reduce_ex__(self, proto)


class AbsentParameter(Absent, nn.Parameter):
    """The absent form of a plain parameter; subclasses get a form of their own."""


def describing(function: Callable[ParametersT, ReturnT]) -> Callable[ParametersT, ReturnT]:
    """Let a function that reads no values ask absent parameters at the cost of plain ones."""

    @wraps(function)
    def run(*args: ParametersT.args, **kwargs: ParametersT.kwargs) -> ReturnT:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run


def hide(parameter: nn.Parameter) -> None:
    """Make a parameter absent: ``isinstance`` and everything descriptive stay true."""
    kind = type(parameter)
    if not issubclass(kind, Absent):
        object.__setattr__(parameter, "__class__", _absent_class(kind))


def show(parameter: nn.Parameter) -> None:
    """Give an absent parameter the class it had."""
    kind = type(parameter)
    if issubclass(kind, Absent):
        object.__setattr__(parameter, "__class__", _plain_class(kind))


def copy_refusal() -> None:
    """Stand for copying and pickling where an operator is asked for."""


@cache
def _absent_class(kind: type) -> type:
    """Return the absent form of a parameter class."""
    if kind is nn.Parameter:
        return AbsentParameter
    absent = type(kind.__name__, (Absent, kind), {"__slots__": ()})
    absent.__module__ = kind.__module__
    return absent


@cache
def _plain_class(kind: type) -> type:
    """Return the class that an absent form belongs to."""
    return nn.Parameter if kind is AbsentParameter else kind.__bases__[1]


def _bring(parameter: object, func: Callable[..., Any]) -> None:
    """Ask the engine for the values of a parameter, if it is absent."""
    if isinstance(parameter, Absent) and isinstance(parameter, nn.Parameter):
        record = getattr(parameter, ATTRIBUTE, None)
        if record is None:  # something built from the class of a parameter
            show(parameter)
        else:
            record.engine.values.bring(record, func)


def _pin(parameter: nn.Parameter, func: Callable[..., Any], pinned: list[Chunk]) -> None:
    """Bring a parameter's values and keep them while those of other arguments are brought."""
    _bring(parameter, func)
    record = getattr(parameter, ATTRIBUTE, None)
    if record is not None:
        record.chunk.num_pins += 1
        pinned.append(record.chunk)


def _takes_pieces(target: object) -> bool:
    """Return whether a write to this tensor may store the owned piece alone."""
    record = getattr(target, ATTRIBUTE, None) if isinstance(target, Absent) else None
    return record is not None and record.engine.values.takes_pieces


def _write(parameter: nn.Parameter, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Carry out ``parameter.copy_(src)`` on the part that this rank owns."""
    del non_blocking
    record = getattr(parameter, ATTRIBUTE)
    if parameter.requires_grad and torch.is_grad_enabled():
        raise ShardwiseError(
            mismatch(
                "a write to a parameter",
                expected="torch.no_grad()",
                got="grad mode",
                where=record.name,
                fix="write inside torch.no_grad()",
            )
        )
    record.engine.values.write(record, record.localise(src))
    return parameter


def _changes_nothing(func: Callable[..., Any], target: object, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401
    """Return whether a cast or a move, as of ``module.to``, would return the parameter itself."""
    if not isinstance(target, Absent) or not isinstance(target, nn.Parameter):
        return False
    if kwargs.get("memory_format") is not None:
        return False
    probe = torch.empty(0, dtype=target.dtype, device=target.device)
    with torch._C.DisableTorchFunctionSubclass():
        return func(probe, *args, **kwargs) is probe


def _parameters_in(value: Any) -> list[nn.Parameter]:  # noqa: ANN401 - any argument
    """Return the parameters among arguments, in containers too."""
    if isinstance(value, nn.Parameter):
        return [value]
    found: list[nn.Parameter] = []
    if isinstance(value, list | tuple):
        for item in value:
            found += _parameters_in(item)
    elif isinstance(value, dict):
        found += _parameters_in(list(value.values()))
    return found


_T: Any = torch.Tensor
_SET_DATA: Any = _T.data.__set__
_CASTS: frozenset[Any] = frozenset(
    {_T.to, _T.float, _T.double, _T.half, _T.bfloat16, _T.cpu, _T.cuda, _T.type}
)
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
                "is_nested",
                "is_quantized",
                "is_sparse",
                "itemsize",
                "layout",
                "nbytes",
                "ndim",
                "output_nr",
                "retains_grad",
                "shape",
                "_backward_hooks",
                "_post_accumulate_grad_hooks",
                "_version",
            )
        ),
        *(_T.requires_grad.__get__, _T.requires_grad.__set__),
        *(_T._backward_hooks.__set__, _T._post_accumulate_grad_hooks.__set__),
        *(_T.grad.__get__, _T.grad.__set__, _T.grad.__delete__),
        *(_T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.is_contiguous, _T.ndimension),
        *(_T.is_floating_point, _T.is_complex, _T.element_size, _T.requires_grad_, _T.__len__),
        *(_T.register_hook, _T.register_post_accumulate_grad_hook, _T.get_device, _T.__hash__),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like),
        *(torch.randn_like, _T.new_zeros, _T.new_ones, _T.new_empty, _T.new_full, _T.new_tensor),
        *(torch.result_type, _T.is_inference, _T.is_shared, _T.is_sparse_csr.__get__),
        *(
            torch.is_same_size,
            torch._has_compatible_shallow_copy_type,
            torch.autograd.grad,
            torch.autograd.backward,
        ),
    ]
)
