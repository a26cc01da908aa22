"""Placement policies by name: what each means for the engine, and the ratios that can be set.

A policy here moves nothing: it is translated, once, into choices of ``shardwise.shard``. Ratios are
set for a whole class, as in that library; a manager reads them when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast, get_args

import torch

from shardwise.errors import ConfigurationError, mismatch
from shardwise.options import AdaptiveOffload, Budget
from shardwise.residency.presets import Fractions, PolicyName, Preset, find_preset

if TYPE_CHECKING:
    from collections.abc import Mapping

MEBIBYTE = 2**20


class AutoPlacementPolicy:
    """Settings of managers with the policy "auto" that are made from now on."""

    _cap_ratio: ClassVar[float] = 0.9

    @staticmethod
    def set_warmup_non_model_data_ratio(ratio: float) -> None:
        """Check a ratio; without effect: the first step leaves what it can to activations."""
        _check_ratio("warmup_non_model_data_ratio", ratio)

    @staticmethod
    def set_steady_cuda_cap_ratio(ratio: float) -> None:
        """Choose the share of the accelerator's memory that training may take; default 0.9."""
        _check_ratio("steady_cuda_cap_ratio", ratio)
        AutoPlacementPolicy._cap_ratio = float(ratio)

    @staticmethod
    def budget() -> Budget:
        """Return the budget that managers get by default: no limit without an accelerator."""
        if not torch.accelerator.is_available():
            return Budget()
        percent = f"{100 * AutoPlacementPolicy._cap_ratio:.6f}".rstrip("0").rstrip(".")
        return Budget(accelerator=f"{percent}%")


class ConstPlacementPolicy:
    """Settings of managers with the policy "const" that are made from now on."""

    _boundary_bytes: ClassVar[int | None] = None

    @staticmethod
    def set_const_memory_boundary(cuda_memory_mb: int) -> None:
        """Choose how many MiB of gathered chunks may stay; default 512."""
        if not isinstance(cuda_memory_mb, int) or cuda_memory_mb < 1:
            raise ConfigurationError(
                mismatch(
                    "set_const_memory_boundary",
                    expected="a positive number of MiB",
                    got=repr(cuda_memory_mb),
                    fix="pass an int",
                )
            )
        ConstPlacementPolicy._boundary_bytes = cuda_memory_mb * MEBIBYTE

    @staticmethod
    def kept_bytes(default: int | None) -> int | None:
        """Return the limit that was set."""
        set_bytes = ConstPlacementPolicy._boundary_bytes
        return default if set_bytes is None else set_bytes


class PlacementPolicyFactory:
    """The names of policies."""

    @staticmethod
    def get_policy_names() -> tuple[str, ...]:
        """Return all names."""
        return get_args(PolicyName)

    @staticmethod
    def get_default_device(policy_name: str) -> torch.device:
        """Return where slices rest by default: the accelerator for "cuda" and "static"."""
        find_preset(cast("PolicyName", policy_name))
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if policy_name in ("cuda", "static") and here is not None:
            return here
        return torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One policy with its settings."""

    name: str
    fractions: Fractions | None = None
    """For "static" alone."""
    budget: Budget | None = None
    """For "auto" alone; None is that of ``AutoPlacementPolicy``."""
    const_bytes: int | None = None
    """For "const" alone, read from ``ConstPlacementPolicy``."""

    def __post_init__(self) -> None:
        """Refuse unknown names and settings of other policies."""
        self.preset(whole_bytes=0)
        if self.budget is not None and self.name != "auto":
            raise ConfigurationError(
                mismatch(
                    "budget",
                    expected="None",
                    got=self.budget,
                    where=f"policy {self.name}",
                    fix='pass it with "auto" only',
                )
            )

    def preset(self, *, whole_bytes: int) -> Preset:
        """Return the choices that this policy stands for.

        Args:
            whole_bytes: Of all chunks together, gathered.
        """
        name = cast("PolicyName", self.name)
        preset = find_preset(name, whole_bytes=whole_bytes, fractions=self.fractions)
        if self.name == "auto" and self.budget is not None:
            return replace(preset, offload=AdaptiveOffload(self.budget))
        if self.const_bytes is not None:
            return replace(preset, keep_bytes=self.const_bytes)
        if self.fractions is not None and self.fractions.shard == 0:
            return replace(preset, keep_bytes=None)  # all of them, however they are padded
        return preset


def make_policy(name: str, fractions: Mapping[str, float | None], budget: Budget | None) -> Policy:
    """Return a policy with the settings in force.

    Args:
        name: One of ``PlacementPolicyFactory.get_policy_names()``.
        fractions: Fields of ``Fractions``; None where the user has given nothing.
        budget: For "auto".

    Raises:
        ConfigurationError: An unknown name, or settings that this policy has no use for.
    """
    given = {field: value for field, value in fractions.items() if value is not None}
    if name == "auto" and budget is None:
        budget = AutoPlacementPolicy.budget()
    default = find_preset("const").keep_bytes
    return Policy(
        name=name,
        fractions=Fractions(**given) if given else None,
        budget=budget,
        const_bytes=ConstPlacementPolicy.kept_bytes(default) if name == "const" else None,
    )


def _check_ratio(name: str, ratio: float) -> None:
    """Refuse what is no share."""
    if not isinstance(ratio, int | float) or not 0 < ratio < 1:
        raise ConfigurationError(
            mismatch(
                f"AutoPlacementPolicy.{name}",
                expected="a number between 0 and 1",
                got=repr(ratio),
                fix="pass a share of the accelerator's memory",
            )
        )
