"""What a user may choose about where bytes lie between uses: fractions, or budgets of tiers.

It does not decide which bytes lie where: see ``shardwise.residency``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal, TypeAlias

from shardwise.errors import ConfigurationError, mismatch

Size: TypeAlias = int | str | None
"""Bytes as a number, as text such as "60GiB", or as a share of what a device has such as "80%";
None is no limit."""

_BYTES_PER_UNIT = {"b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for ending, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?i?b|%)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many bytes one rank may hold in each tier.

    A size is a number of bytes, text such as "512MiB" (1024 based), "1.5GB" (1000 based) or "80%"
    of what the device has, or None.

    Example:
        >>> Budget(accelerator="60GiB", host="80%").host
        '80%'
    """

    accelerator: Size = None
    """Bytes on the accelerator, everything counted: parameters, state, gathered chunks and
    activations. None is no limit: nothing is moved away."""
    host: Size = None
    """Bytes in host memory; None is no limit."""
    disk: Size = None
    """Bytes on disk below ``disk_path``; None is no limit where there is a path."""
    disk_path: str | Path | None = None
    """Folder of the disk tier, on a local disk; None is no disk tier."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be read, and a size of no disk."""
        for name in ("accelerator", "host", "disk"):
            _read_size(getattr(self, name), what=f"Budget.{name}")
        _check_path(self.disk_path, what="Budget.disk_path")
        if self.disk is not None and self.disk_path is None:
            raise ConfigurationError(
                mismatch(
                    "Budget.disk_path",
                    expected="a folder, since disk has a size",
                    got=None,
                    fix="name a folder on a local disk, or leave disk out",
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOffload:
    """Fixed fractions of bytes that live off the accelerator between uses.

    Example:
        >>> StaticOffload(optimizer=1.0).to
        'host'
    """

    parameters: float = 0.0
    """Fraction of the bytes of the rank's slices of working parameters, from 0 to 1; it matters at
    stage 3, where whole parameters exist only around their use. Without float32 masters the state
    of these parameters goes along with them, whatever ``optimizer`` says."""
    optimizer: float = 0.0
    """Fraction of the bytes of masters and optimizer state, from 0 to 1; slices of gradients
    follow them."""
    to: Literal["host", "disk"] = "host"
    """Where they live instead."""
    disk_path: str | Path | None = None
    """Folder on a local disk; needed with ``to="disk"`` and refused otherwise."""

    def __post_init__(self) -> None:
        """Refuse what is no fraction, and a path without use."""
        for name in ("parameters", "optimizer"):
            fraction = getattr(self, name)
            is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
            if not (is_number and 0 <= fraction <= 1):
                raise ConfigurationError(
                    mismatch(
                        f"StaticOffload.{name}",
                        expected="a fraction of bytes between 0 and 1",
                        got=repr(fraction),
                        fix="pass 1.0 for everything",
                    )
                )
        if self.to not in ("host", "disk"):
            raise ConfigurationError(
                mismatch(
                    "StaticOffload.to",
                    expected="'host' or 'disk'",
                    got=repr(self.to),
                    fix="choose one of these",
                )
            )
        _check_path(self.disk_path, what="StaticOffload.disk_path")
        if (self.to == "disk") != (self.disk_path is not None):
            expected = "a folder, since to='disk'" if self.to == "disk" else "None, since to='host'"
            raise ConfigurationError(
                mismatch(
                    "StaticOffload.disk_path",
                    expected=expected,
                    got=repr(self.disk_path),
                    fix="name a folder with to='disk', and only then",
                )
            )


@dataclass(frozen=True, slots=True)
class AdaptiveOffload:
    """Keep on the accelerator what fits beside the measured activations; the rest on host, disk.

    Example:
        >>> AdaptiveOffload(Budget(accelerator="60GiB", host="400GiB")).budget.host
        '400GiB'
    """

    budget: Budget
    """Bytes that one rank may hold in each tier."""

    def __post_init__(self) -> None:
        """Refuse anything but a budget."""
        if not isinstance(self.budget, Budget):
            raise ConfigurationError(
                mismatch(
                    "AdaptiveOffload.budget",
                    expected="a shardwise.Budget",
                    got=type(self.budget).__name__,
                    fix='write AdaptiveOffload(Budget(accelerator="60GiB"))',
                )
            )


def resolve_bytes(size: Size, *, capacity_bytes: int | None, what: str) -> int | None:
    """Return a size in bytes; shares are rounded down.

    Args:
        size: As in a field of ``Budget``.
        capacity_bytes: What the device has; None where that is not known.
        what: Name of the setting, for messages.

    Returns:
        Bytes, or None for no limit.

    Raises:
        ConfigurationError: The size cannot be read, or is a share of an unknown capacity.

    Example:
        >>> resolve_bytes("50%", capacity_bytes=2**30, what="Budget.host") == 512 * 2**20
        True
    """
    read = _read_size(size, what=what)
    if read is None:
        return None
    number, unit = read
    if unit != "%":
        return int(number * _BYTES_PER_UNIT[unit])
    if capacity_bytes is None:
        raise ConfigurationError(
            mismatch(
                what,
                expected="bytes, since the capacity of the device is not known",
                got=repr(size),
                fix='pass a size such as "60GiB"',
            )
        )
    return int(number * capacity_bytes / 100)


def _read_size(size: Size, *, what: str) -> tuple[Decimal, str] | None:
    """Return number and unit (lower case) of a size, None for no limit."""
    if size is None:
        return None
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return Decimal(size), "b"
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    unit = "" if match is None else match[2].lower()
    if match is None or unit == "ib" or (unit == "%" and not 0 < Decimal(match[1]) <= 100):
        raise ConfigurationError(
            mismatch(
                what,
                expected="whole bytes from 0, a size with a unit or a share up to 100%",
                got=repr(size),
                fix='write 2**30, "60GiB" (KiB to PiB), "1.5GB" (kB to PB), "80%" or None',
            )
        )
    return Decimal(match[1]), unit


def _check_path(path: str | Path | None, *, what: str) -> None:
    """Refuse what is no path."""
    if path is not None and not (isinstance(path, str | Path) and str(path)):
        raise ConfigurationError(
            mismatch(what, expected="a folder or None", got=repr(path), fix="pass a str or a Path")
        )
