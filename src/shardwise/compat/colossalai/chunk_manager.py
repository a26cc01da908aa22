"""``ChunkManager``: how large chunks are, and a look at the bytes that they hold.

It owns no chunk: the engine of the sharded module does. Sizes are numbers of elements.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigurationError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from shardwise.optimizer.sharded import ShardedOptimizer
    from shardwise.runtime.engine import Engine

IGNORED_SETTINGS = frozenset({"init_device", "pin_memory", "cpu_shard_init"})
"""Settings of a chunk that change no number and no byte here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSettings:
    """The chunks of one number of ranks."""

    chunk_numel: int
    keep_gathered: bool


class ChunkManager:
    """Chunk sizes by the number of ranks that share a parameter.

    Args:
        chunk_configuration: Number of ranks -> ``{"chunk_size": elements, "keep_gathered": bool}``,
            as ``search_chunk_configuration`` returns it. The caller's dicts are left as they are. A
            size need not be a multiple of the ranks; a larger parameter gets a chunk of its own.
            With ``keep_gathered`` parameters are whole on every rank. Gradients and optimizer state
            are sharded all the same, which changes no number.
        init_device: Without effect: chunks are packed where the parameters lie.

    Raises:
        ConfigurationError: A configuration that cannot be read.

    Example:
        >>> manager = ChunkManager({1: {"chunk_size": 1024, "keep_gathered": False}})
        >>> manager.total_mem
        {'cpu': 0, 'cuda': 0}
    """

    def __init__(
        self,
        chunk_configuration: Mapping[int, Mapping[str, Any]],
        init_device: torch.device | None = None,
    ) -> None:
        self._settings = {
            degree: _read(degree, entry) for degree, entry in chunk_configuration.items()
        }
        self._engine: weakref.ref[Engine] | None = None
        self._optimizer: weakref.ref[ShardedOptimizer] | None = None

    def settings_for(self, num_ranks: int) -> ChunkSettings:
        """Return the chunks of parameters that so many ranks share.

        Raises:
            ConfigurationError: The configuration says nothing about them.
        """
        if num_ranks not in self._settings:
            raise ConfigurationError(
                mismatch(
                    "chunk_configuration",
                    expected=f"chunks for {num_ranks} ranks",
                    got=f"chunks for {sorted(self._settings)}",
                    fix="call search_chunk_configuration on these ranks",
                )
            )
        return self._settings[num_ranks]

    def serve(self, engine: Engine, optimizer: ShardedOptimizer | None = None) -> None:
        """Look at the chunks of an engine, and at the state of its optimizer; neither is kept."""
        self._engine = weakref.ref(engine)
        if optimizer is not None:
            self._optimizer = weakref.ref(optimizer)

    @property
    def is_in_use(self) -> bool:
        """True while a module has these chunks."""
        return self._engine is not None and self._engine() is not None

    @property
    def total_mem(self) -> dict[str, int]:
        """Bytes that this rank holds: "cpu" in host memory, "cuda" on the accelerator.

        Gathered chunks and, once there is a ``ZeroOptimizer``, optimizer state included. Where the
        parameters lie counts as the accelerator, also if that is the CPU.
        """
        held = {"cpu": 0, "cuda": 0}
        engine = None if self._engine is None else self._engine()
        if engine is None:
            return held
        optimizer = None if self._optimizer is None else self._optimizer()
        tensors = engine.tensors() if optimizer is None else optimizer.held_storages()
        seen: set[int] = set()
        held["cpu"] = _count(tensors.get("host", ()), seen)
        _count(tensors.get("disk", ()), seen)
        held["cuda"] = sum(_count(of_purpose, seen) for of_purpose in tensors.values())
        gathered = [c.parameters_C for c in engine.chunks if c.parameters_C is not None]
        held["cuda"] += _count(gathered, seen)
        return held

    @property
    def accessed_mem(self) -> int:
        """Bytes of chunks that are whole at the moment and need not be at rest."""
        engine = None if self._engine is None else self._engine()
        if engine is None or engine.residence is None:
            return 0
        return engine.residence.gatherer.gathered_bytes


def _read(degree: object, entry: Mapping[str, Any]) -> ChunkSettings:
    """Check the settings of one number of ranks."""
    size, is_kept = entry.get("chunk_size"), entry.get("keep_gathered", False)
    unknown = entry.keys() - IGNORED_SETTINGS - {"chunk_size", "keep_gathered"}
    is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    is_degree = isinstance(degree, int) and degree >= 1
    if unknown or not (is_size and is_degree and isinstance(is_kept, bool)):
        raise ConfigurationError(
            mismatch(
                "chunk_configuration",
                expected='{number of ranks: {"chunk_size": elements, "keep_gathered": bool}}',
                got={degree: dict(entry)},
                fix="pass what search_chunk_configuration returns",
            )
        )
    assert isinstance(size, int)
    return ChunkSettings(chunk_numel=size, keep_gathered=is_kept)


def _count(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Return the bytes of storages that were not counted yet."""
    num_bytes = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            num_bytes += storage.nbytes()
    return num_bytes
