"""Module hooks that a copy of the module does not carry along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Hook:
    """A hook that a copied or pickled module exchanges for one that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Call ``function``."""
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any hook
        """Call the real hook."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        """Return a hook without effect."""
        return _no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """Pickle as the hook without effect."""
        return _get_no_hook, ()


def _no_hook(*_: object, **__: object) -> None:
    """Do nothing: the hook of a plain copy."""


def _get_no_hook() -> Callable[..., None]:
    """Return the hook that a pickle restores."""
    return _no_hook
