"""All ranks that take part in a checkpoint, and how they agree; it knows nothing of files.

The ranks lie on the axes of the sharded model (shard, replicate, and those that the model itself is
parallel over), so what must reach all of them travels axis by axis, on the groups that these have.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from shardwise.errors import CheckpointError, mismatch
from shardwise.runtime.topology import Axis

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from shardwise.runtime.engine import Engine

T = TypeVar("T")


class Ranks:
    """Ranks in one fixed order: the shard axis runs fastest."""

    def __init__(self, axes: Iterable[Axis]) -> None:
        """Take part on these axes."""
        self._axes = [axis for axis in axes if axis.group is not None]
        self.size = 1
        """Number of ranks."""
        self.rank = 0
        """Position of this rank; 0 writes what all of them hold."""
        for axis in self._axes:
            self.rank += self.size * axis.rank
            self.size *= axis.size

    @classmethod
    def of(cls, engines: Iterable[Engine]) -> Ranks:
        """Return the ranks of some engines: those of the largest, or all ranks without any."""
        topologies = [engine.topology for engine in engines]
        if topologies:
            widest = max(topologies, key=lambda topology: topology.size)
            return cls([*widest.axes, *widest.model])
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls([])
        world = dist.group.WORLD
        return cls(
            [Axis(group=world, control=world, rank=dist.get_rank(), size=dist.get_world_size())]
        )

    def apart(self) -> Ranks:
        """Return the same ranks on groups that nothing else uses. Collectives: one per axis."""
        axes: list[Axis] = []
        for axis in self._axes:
            assert axis.group is not None
            members = dist.get_process_group_ranks(axis.group)
            beside = dist.new_group(members, backend="gloo", use_local_synchronization=True)
            assert isinstance(beside, dist.ProcessGroup)  # this rank is among them
            axes.append(replace(axis, control=beside))
        return Ranks(axes)

    @property
    def is_first(self) -> bool:
        """This rank writes what all ranks hold."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order, on all ranks. Collectives: one exchange per axis."""
        values = [value]
        for axis in self._axes:
            parts: list[list[T]] = [[] for _ in range(axis.size)]
            dist.all_gather_object(parts, values, group=axis.control)
            values = [one for part in parts for one in part]
        return values

    def collect(self, value: T) -> list[T]:
        """Return every rank's value on the first rank, less on others.

        Collectives: one gather per axis.
        """
        values = [value]
        for axis in self._axes:
            parts: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
            dist.gather_object(values, parts, group=axis.control, group_dst=0)
            values = [one for part in parts or () for one in part]
        return values

    def share(self, value: T) -> T:
        """Return the first rank's value on all ranks. Collectives: one broadcast per axis."""
        for axis in reversed(self._axes):
            box: list[Any] = [value]
            dist.broadcast_object_list(box, group=axis.control, group_src=0)
            value = box[0]
        return value

    @contextmanager
    def agreed(self) -> Generator[None]:
        """Let all ranks raise when one of them raises inside.

        Collectives: one exchange on leaving; what is inside must communicate alike on all ranks or
        not at all.

        Raises:
            CheckpointError: On ranks that did not fail themselves, with the message of the first
                that did. A failing rank raises its own error.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # whatever it is, other ranks must not wait for this one
            error = caught
        _raise_any(error, self.gather(None if error is None else _say(error)))

    def exchange(self, action: Callable[[], T]) -> list[T]:
        """Return what an action returned on every rank, in order; all raise when one does.

        Collectives: one exchange, as ``agreed``.
        """
        error: Exception | None = None
        results: list[T] = []
        try:
            results.append(action())
        except Exception as caught:  # as in agreed
            error = caught
        told = self.gather((None if error is None else _say(error), results))
        _raise_any(error, [message for message, _ in told])
        return [result for _, one in told for result in one]


def refuse_differences(asked: list[dict[str, object]]) -> None:
    """Raise on all ranks where they were called with arguments that lead them different ways."""
    for rank, one in enumerate(asked):
        for name, value in one.items():
            if value != asked[0][name]:
                raise CheckpointError(
                    mismatch(
                        name,
                        expected=f"{asked[0][name]!r} on all ranks, as on the first",
                        got=f"{value!r} (rank {rank})",
                        fix="call it with the same arguments on every rank",
                    )
                )


def _raise_any(error: Exception | None, messages: list[str | None]) -> None:
    """Raise this rank's own error, or say what the first rank that failed has said."""
    if error is not None:
        if isinstance(error, OSError):
            raise CheckpointError(_say(error)) from error
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise CheckpointError(f"{message} (rank {rank})")


def _say(error: Exception) -> str:
    """Return the message of an error; storage says which file in its own words."""
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename is not None else ""
        return (
            f"storage expected to be usable but got {error.strerror or error}{where}; "
            "free space or check permissions and try again."
        )
    return str(error) or type(error).__name__
