"""What is known of the optimizers of torch."""

from __future__ import annotations

import torch

STATE_PER_PARAMETER: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Updates of one parameter depend on no other: they may run chunk by chunk."""

ELEMENT_WISE: frozenset[type[torch.optim.Optimizer]] = STATE_PER_PARAMETER - {
    torch.optim.Adafactor,
    torch.optim.Muon,
}
"""Updates of one element depend on no other: they may run tile by tile."""

_NO_BEHAVIOUR = frozenset(
    {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__firstlineno__"}
    | {"__static_attributes__"}
)


def known_as(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the class of torch that a class updates as: of one that adds a constructor alone.

    Any other class is its own.
    """
    for base in kind.__mro__:
        if base in STATE_PER_PARAMETER:
            return base
        added = vars(base).keys() - _NO_BEHAVIOUR
        if added - {"step"} or ("step" in added and not _is_inherited(base)):
            break
    return kind


def _is_inherited(kind: type) -> bool:
    """Return whether ``step`` is that of the parent, which torch has put hooks around.

    Torch does so in the class of the first instance that it makes.
    """
    own, parent = vars(kind)["step"], getattr(kind.__base__, "step", None)
    inner = getattr(own, "__wrapped__", None)
    return getattr(own, "hooked", False) and inner in (
        parent,
        getattr(parent, "__wrapped__", None),
    )
