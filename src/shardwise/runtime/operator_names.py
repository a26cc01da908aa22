"""Call an operator as a user has written it: ``parameter.data``, ``torch.isnan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.overrides import resolve_name

if TYPE_CHECKING:
    from collections.abc import Callable

_METHOD = "torch.Tensor."
_UNLISTED = "_VariableFunctionsClass."
"""Prefix of functions of ``torch`` that torch gives no public name."""


def operator_name(func: Callable[..., Any]) -> str:
    """Return the name of what ``__torch_function__`` was called with."""
    name = resolve_name(func) or getattr(func, "__qualname__", None) or str(func)
    if name.startswith(_METHOD):
        attribute = name.removeprefix(_METHOD).removesuffix(".__get__")
        return f"parameter.{attribute.removesuffix('.__set__')}"
    return f"torch.{name.removeprefix(_UNLISTED)}" if name.startswith(_UNLISTED) else name


def is_write(func: Callable[..., Any]) -> bool:
    """Return whether an operator changes its argument, by the form of its name."""
    name = resolve_name(func) or getattr(func, "__qualname__", "")
    return name.endswith(".__set__") or (name.endswith("_") and not name.endswith("__"))
