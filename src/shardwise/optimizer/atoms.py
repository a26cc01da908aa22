"""How finely an update may be cut: by element, by block, or only by whole parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from shardwise.errors import ConfigurationError, mismatch
from shardwise.runtime.managed import local_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Atom = Literal["element", "parameter"] | int

NEEDS_WHOLE_PARAMETERS: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Muon,
    torch.optim.Adafactor,
)
"""Optimizers of torch whose update of an element depends on the rest of its parameter."""

REFUSED: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "its update needs inner products over all parameters; train it unsharded",
    torch.optim.SparseAdam: "gradients are reduced dense; use Adam",
}
"""Optimizers of torch that cannot work on pieces, and what to do instead."""


def choose_atom(optimizer: torch.optim.Optimizer, asked: Atom | None) -> Atom:
    """Return the atom for an optimizer, or refuse the pair.

    Raises:
        ConfigurationError: The optimizer cannot work on pieces, or ``asked`` is no atom.
    """
    for kind, reason in REFUSED.items():
        if isinstance(optimizer, kind):
            raise ConfigurationError(
                mismatch(
                    "optimizer",
                    expected="one whose update can be cut over ranks",
                    got=kind.__name__,
                    fix=reason,
                )
            )
    if asked is None:
        return "parameter" if isinstance(optimizer, NEEDS_WHOLE_PARAMETERS) else "element"
    is_block = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 1
    if asked not in ("element", "parameter") and not is_block:
        raise ConfigurationError(
            mismatch(
                "atom",
                expected="'element', 'parameter' or a number of elements",
                got=repr(asked),
                fix="choose what a cut may not split",
            )
        )
    return asked


def atoms_of(parameters: Iterable[nn.Parameter], atom: Atom) -> dict[nn.Parameter, int]:
    """Return the elements that stay together per parameter, where it is more than one."""
    if atom == "element":
        return {}
    numels = {p: local_part(p).numel() for p in parameters}
    whole = {p: numel for p, numel in numels.items() if numel > 1}
    if isinstance(atom, int):
        return {p: min(atom, numel) for p, numel in whole.items() if min(atom, numel) > 1}
    return whole
