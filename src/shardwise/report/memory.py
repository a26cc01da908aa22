"""What training holds in each tier on this rank, and when: the answer of ``memory_report``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardwise.errors import ConfigurationError, mismatch
from shardwise.optimizer import ShardedOptimizer
from shardwise.optimizer.anatomy import anatomy_of
from shardwise.residency import Tier as TierName
from shardwise.shard import engine_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import nn

    from shardwise.runtime.engine import Engine
    from shardwise.tiers import Tier

_ELSEWHERE = ("host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """Bytes of one tier on this rank."""

    held_bytes: int
    """Now."""
    peak_bytes: int | None
    """At most, since the start or the last reset; None where nothing has counted."""
    limit_bytes: int | None
    """What may be held; None is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentUse:
    """One recorded use of a chunk."""

    chunk: str
    """Number of the chunk, and its first parameter."""
    segment: str
    """"forward", "backward" or "update"."""
    activation_bytes: int
    """What autograd held for backward at this moment, on the accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Memory of one rank; ``str`` makes a table of it."""

    accelerator: TierUse
    host: TierUse
    disk: TierUse | None
    """None where there is no disk tier."""
    accelerator_peak: Mapping[str, int]
    """What was held when the accelerator held the most: bytes of "resident" parameters and buffers,
    "slices", "gathered" chunks, "buffers" of gradients, "activations"."""
    homes: Mapping[str, int]
    """Bytes of parameters, gradients and state in each tier now, without activations."""
    moments: tuple[MomentUse, ...]
    """The last step, in order (of a very long one the last 65,536); empty before it has ended, and
    where nothing is recorded."""

    def __str__(self) -> str:
        """Return a table of the tiers and a line on activations."""
        rows = [("accelerator", self.accelerator), ("host", self.host)]
        rows += [] if self.disk is None else [("disk", self.disk)]
        lines = [f"{'tier':<12}{'held':>14}{'peak':>14}{'limit':>14}"]
        lines += [
            f"{name:<12}{_show(use.held_bytes)}{_show(use.peak_bytes)}{_show(use.limit_bytes)}"
            for name, use in rows
        ]
        if self.accelerator_peak:
            parts = ", ".join(
                f"{name} {_mebibytes(size)}" for name, size in self.accelerator_peak.items() if size
            )
            lines.append(f"peak of the accelerator: {parts}")
        if self.moments:
            highest = max(self.moments, key=lambda moment: moment.activation_bytes)
            lines.append(
                f"most activations: {_mebibytes(highest.activation_bytes)} in {highest.segment} of "
                f"{highest.chunk}, one of {len(self.moments)} moments"
            )
        return "\n".join(lines)


def memory_report(
    sharded: nn.Module | ShardedOptimizer, *, reset_peaks: bool = False
) -> MemoryReport:
    """Return what a sharded model or optimizer holds in each tier on this rank; collectives: none.

    High-water marks of the accelerator and the moments of a step are recorded under
    ``AdaptiveOffload`` only; ``AdaptiveOffload(Budget())`` sets no limit and moves nothing. They
    count parameters, slices, gradients, communication buffers and what autograd saves, to the byte;
    what operators allocate for themselves while they run is not seen.

    Args:
        sharded: A module that ``shard`` was called on, or a ``ShardedOptimizer``.
        reset_peaks: Let high-water marks fall to what is held now, after they were read.

    Returns:
        A snapshot; ``print`` shows it as a table.

    Raises:
        ConfigurationError: Neither of the two.

    Example:
        >>> import torch, shardwise as sw
        >>> model = sw.shard(torch.nn.Linear(4, 2), offload=sw.AdaptiveOffload(sw.Budget()))
        >>> sw.memory_report(model).accelerator.held_bytes >= 40
        True
    """
    engines = _engines_of(sharded)
    report = _add([_report(engine) for engine in engines])
    if reset_peaks:
        for engine in engines:
            engine.meter.reset()
            for tier in _tiers_of(engine).values():
                tier.reset_peak()
    return report


def _engines_of(sharded: nn.Module | ShardedOptimizer) -> list[Engine]:
    """Return the engines behind a face."""
    if not isinstance(sharded, ShardedOptimizer):
        return [engine_of(sharded)]
    binding = anatomy_of(sharded).binding
    engines = [] if binding is None else binding.engines()
    if not engines:
        raise ConfigurationError(
            mismatch(
                "memory_report",
                expected="an optimizer with sharded parameters",
                got="one without",
                fix="pass the sharded module",
            )
        )
    return engines


def _tiers_of(engine: Engine) -> dict[str, Tier]:
    """Return the tiers beside the accelerator."""
    if engine.offload is None:
        return {}
    tiers = engine.offload.mover.tiers
    return {"host": tiers.host} | ({} if tiers.disk is None else {"disk": tiers.disk})


def _report(engine: Engine) -> MemoryReport:
    """Return the report of one engine."""
    tensors, tiers = engine.tensors(), _tiers_of(engine)
    adaptation = engine.adaptation
    limits = None if adaptation is None else adaptation.limits
    slices = {name: _storage_bytes(tensors.get(name, ())) for name in _ELSEWHERE}
    others = [t for name, group in tensors.items() if name not in _ELSEWHERE for t in group]
    held_bytes = _storage_bytes(others)
    if engine.meter.is_on:
        held_bytes = sum(engine.meter.held.values())

    def use(name: str) -> TierUse:
        tier = tiers.get(name)
        return TierUse(
            held_bytes=0 if tier is None else tier.allocated_bytes,
            peak_bytes=None if tier is None else tier.peak_bytes,
            limit_bytes=None if limits is None else limits.of(TierName(name)),
        )

    trace = engine.recorder.trace
    return MemoryReport(
        accelerator=TierUse(
            held_bytes=held_bytes,
            peak_bytes=engine.meter.peak_bytes if engine.meter.is_on else None,
            limit_bytes=None if limits is None else limits.accelerator_bytes,
        ),
        host=use("host"),
        disk=use("disk") if "disk" in tiers else None,
        accelerator_peak=MappingProxyType(
            {holding.name.lower(): size for holding, size in engine.meter.peak.items()}
        ),
        homes=MappingProxyType(
            {"accelerator": _storage_bytes(others), **slices},
        ),
        moments=tuple(
            MomentUse(
                chunk=engine.chunks[moment.chunk].label,
                segment=moment.segment.name.lower(),
                activation_bytes=moment.activation_bytes,
            )
            for moment in (() if trace is None else trace.moments)
        ),
    )


def _add(reports: list[MemoryReport]) -> MemoryReport:
    """Return the sum of reports; each engine has limits and tiers of its own."""
    if len(reports) == 1:
        return reports[0]
    disks = [report.disk for report in reports if report.disk is not None]
    return MemoryReport(
        accelerator=_sum_uses([report.accelerator for report in reports]),
        host=_sum_uses([report.host for report in reports]),
        disk=_sum_uses(disks) if disks else None,
        accelerator_peak=_sum_counts(report.accelerator_peak for report in reports),
        homes=_sum_counts(report.homes for report in reports),
        moments=tuple(moment for report in reports for moment in report.moments),
    )


def _sum_uses(uses: list[TierUse]) -> TierUse:
    """Return the sum; unknown where one part is."""
    peaks, limits = [use.peak_bytes for use in uses], [use.limit_bytes for use in uses]
    return TierUse(
        held_bytes=sum(use.held_bytes for use in uses),
        peak_bytes=None if None in peaks else sum(peak or 0 for peak in peaks),
        limit_bytes=None if None in limits else sum(limit or 0 for limit in limits),
    )


def _sum_counts(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    """Return sums by name."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return MappingProxyType(dict(total))


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind some tensors, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _show(num_bytes: int | None) -> str:
    """Return a column."""
    return f"{'-' if num_bytes is None else _mebibytes(num_bytes):>14}"


def _mebibytes(num_bytes: int) -> str:
    """Return bytes in the unit that people read."""
    return f"{num_bytes / 2**20:,.2f} MiB"
