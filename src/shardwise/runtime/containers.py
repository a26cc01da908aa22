"""Apply a function to every tensor of a nested value and keep the types of its containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

TensorFunction = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(function: TensorFunction, value: Any) -> Any:  # noqa: ANN401 - any user value
    """Return ``value`` with every tensor replaced; unchanged containers are kept.

    Lists, tuples, named tuples, dicts and their subclasses, and dataclasses (frozen ones too) are
    entered; anything else is returned untouched.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return result
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(function, value)
    return value


def _map_dataclass(function: TensorFunction, value: Any) -> Any:  # noqa: ANN401 - any dataclass
    """Copy a dataclass with mapped fields, without running its ``__init__``."""
    old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = {name: map_tensors(function, item) for name, item in old.items()}
    if all(new[name] is old[name] for name in old):
        return value
    result = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(result, name, item)
    return result


def cast_floating(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401 - any user value
    """Return ``value`` with floating-point tensors cast to ``dtype``."""
    return map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )
