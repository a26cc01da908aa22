"""The policies of an earlier memory manager by their names, as choices of this library.

Source: ColossalAI, the policies of Gemini, 2022 and 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwise.errors import ConfigurationError, mismatch
from shardwise.options import AdaptiveOffload, Budget, StaticOffload

PolicyName: TypeAlias = Literal["cuda", "cpu", "const", "auto", "static"]

CONST_GATHERED_BYTES = 512 * 2**20
AUTO_ACCELERATOR_SHARE = "90%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a policy's name stands for."""

    offload: StaticOffload | AdaptiveOffload
    """Where slices lie between uses."""
    keep_bytes: int | None
    """Gathered bytes that may stay beyond their use; None is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fractions:
    """The settings of the "static" policy; zeros everywhere are ZeRO-2, ``shard=1`` is ZeRO-3."""

    shard: float = 1.0
    """Fraction of the bytes of whole chunks that are let go after their use."""
    parameters: float = 0.0
    """Fraction of the bytes of working slices in host memory; it takes effect whatever the others
    are."""
    optimizer: float = 0.0
    """Fraction of the bytes of masters, optimizer state and gradients in host memory."""


def find_preset(
    name: PolicyName, *, whole_bytes: int = 0, fractions: Fractions | None = None
) -> Preset:
    """Return the choices that a policy's name stands for.

    ======  ==================================================================================
    cuda    nothing moves, and what is gathered in forward stays until it is updated
    cpu     every slice in host memory; no more is gathered than is in use or coming next
    const   as cpu, and 512 MiB of gathered chunks stay
    auto    what fits into 90% of the accelerator stays there, the rest in host memory
    static  fractions
    ======  ==================================================================================

    Args:
        name: One of the names above.
        whole_bytes: Of all chunks together; for "static".
        fractions: For "static" only.

    Raises:
        ConfigurationError: Another name, fractions out of range, or for a policy without any.
    """
    if fractions is not None and name != "static":
        raise ConfigurationError(
            mismatch(
                "fractions",
                expected="None",
                got=fractions,
                where=f"policy {name}",
                fix='pass them with "static" only',
            )
        )
    everything_on_host = StaticOffload(parameters=1.0, optimizer=1.0)
    match name:
        case "cuda":
            return Preset(offload=StaticOffload(), keep_bytes=None)
        case "cpu":
            return Preset(offload=everything_on_host, keep_bytes=0)
        case "const":
            return Preset(offload=everything_on_host, keep_bytes=CONST_GATHERED_BYTES)
        case "auto":
            budget = Budget(accelerator=AUTO_ACCELERATOR_SHARE)
            return Preset(offload=AdaptiveOffload(budget), keep_bytes=0)
        case "static":
            return _divide(fractions or Fractions(), whole_bytes)
        case _:
            raise ConfigurationError(
                mismatch(
                    "policy",
                    expected="cuda, cpu, const, auto or static",
                    got=repr(name),
                    fix="choose one of these",
                )
            )


def _divide(fractions: Fractions, whole_bytes: int) -> Preset:
    """Return the choices of the "static" policy."""
    if not 0 <= fractions.shard <= 1:
        raise ConfigurationError(
            mismatch(
                "Fractions.shard",
                expected="a fraction of bytes between 0 and 1",
                got=fractions.shard,
                fix="pass 1.0 to let every chunk go",
            )
        )
    offload = StaticOffload(parameters=fractions.parameters, optimizer=fractions.optimizer)
    return Preset(offload=offload, keep_bytes=int((1 - fractions.shard) * whole_bytes))
