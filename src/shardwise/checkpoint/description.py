"""What a checkpoint holds, read from its index and manifest: names, shapes and bytes, no values."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.index import INDEX, OF_OPTIMIZER, OPTIMIZER, read_index
from shardwise.checkpoint.manifest import MANIFEST, check_file, read_manifest
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.state import EXTRA, OURS
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    import os

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    tied_to: str | None
    """The name of the tensor that this is another name of; its bytes are counted there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One checkpoint."""

    model: list[Described]
    """Parameters and buffers."""
    optimizer: list[Described]
    """Optimizer state."""
    world_size: int | None
    """Ranks that wrote it; None where shardwise did not."""
    step: object
    """``extra["step"]``, None without it."""
    damage: str | None
    """What is wrong with its files; None where all were read and match their hashes."""
    is_listed: bool
    """It has a manifest to be verified by."""


def describe(path: str | os.PathLike[str]) -> Description:
    """Return what a checkpoint holds, and whether its files are what was written.

    Raises:
        CheckpointError: There is no checkpoint, or its index cannot be read.
    """
    folder = Path(path)
    is_listed = (folder / MANIFEST).exists() or not (folder / INDEX).exists()
    manifest = read_manifest(folder) if is_listed else None
    damage = None
    try:
        for name, wanted in ({} if manifest is None else manifest.files).items():
            check_file(folder / name, wanted)
    except CheckpointError as error:
        damage = str(error)
    index = read_index(folder)
    model: list[Described] = []
    optimizer: list[Described] = []
    by_place: dict[object, str] = {}
    for name, known in index.tensors.items():
        first = by_place.setdefault(index.places(name) or name, name)
        described = Described(
            name=name.removeprefix(OPTIMIZER) if name.startswith(OF_OPTIMIZER) else name,
            shape=tuple(known.size),
            dtype=known.properties.dtype,
            num_bytes=known.size.numel() * known.properties.dtype.itemsize,
            tied_to=None if first == name else first,
        )
        if name.startswith(OF_OPTIMIZER):
            optimizer.append(described)
        elif not name.startswith(OURS):
            model.append(described)
    step = None
    if damage is None and EXTRA in index.names:
        with closing(Source(folder)) as source:
            extra = source.object(EXTRA)
            step = extra.get("step") if isinstance(extra, dict) else None
    return Description(
        model=model,
        optimizer=optimizer,
        world_size=None if manifest is None else manifest.world_size,
        step=step,
        damage=damage,
        is_listed=is_listed,
    )
