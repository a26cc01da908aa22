"""A checkpoint that is being loaded: verified once by all ranks together, then read in order."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.checkpoint.data_file import DataReader, StoredBox, Target
from shardwise.checkpoint.hashes import hash_of
from shardwise.checkpoint.index import INDEX, Place, read_index
from shardwise.checkpoint.manifest import (
    MANIFEST,
    check_file,
    check_length,
    read_manifest,
    share_of,
)
from shardwise.checkpoint.state import FACTS
from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from shardwise.checkpoint.entries import Part
    from shardwise.checkpoint.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """Copy a part of a stored box into a part of memory."""

    place: Place
    stored: StoredBox
    target: Target


def verify(folder: Path, ranks: Ranks) -> str:
    """Compare this rank's share of the files of a checkpoint with its manifest.

    Returns:
        What tells this checkpoint from another that may take its place.

    Raises:
        CheckpointError: A file differs.
    """
    if not (folder / MANIFEST).exists() and (folder / INDEX).exists():
        if ranks.is_first:
            logger.warning("%s has no %s: it is loaded unverified", folder, MANIFEST)
        return identity(folder)
    files = read_manifest(folder).files
    found = identity(folder)
    if ranks.is_first:  # a file without bytes has no block that somebody would read
        for name, wanted in files.items():
            check_length(folder / name, wanted)
    for name, blocks in share_of(files, ranks.rank, ranks.size).items():
        check_file(folder / name, files[name], blocks)
    return found


def identity(folder: Path) -> str:
    """Return what tells the checkpoint in a folder from others that are saved to the same place."""
    path = folder / MANIFEST
    return hash_of((path if path.exists() else folder / INDEX).read_bytes())


def refuse_other(folder: Path, found: list[str], wanted: str) -> None:
    """Refuse a folder that another checkpoint was published to since it was verified."""
    if any(one != wanted for one in found):
        raise CheckpointError(
            mismatch(
                f"checkpoint {folder}",
                expected="the same one while it is loaded",
                got="another that a job has saved in its place",
                fix="load it again, and let jobs save to places of their own",
            )
        )


class Source:
    """The files of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read the index of verified files.

        Raises:
            CheckpointError: The index is damaged, or speaks of files that were not verified.
        """
        self.folder = folder
        self.index = read_index(folder)
        self._is_ours = FACTS in self.index.names
        self._open_file: tuple[str, DataReader] | None = None
        if not (folder / MANIFEST).exists():
            if self._is_ours:
                read_manifest(folder)  # says that it is lost: shardwise always writes one
            return
        for name in self.index.files - read_manifest(folder).files.keys():
            raise CheckpointError(
                mismatch(
                    f"checkpoint file {folder / name}",
                    expected=f"an entry in {MANIFEST}",
                    got="none",
                    fix="load another checkpoint: this one was changed",
                )
            )

    def close(self) -> None:
        """Close the file that was read last."""
        if self._open_file is not None:
            self._open_file[1].close()
            self._open_file = None

    def writer_of(self, name: str) -> str:
        """Return the file that an object, or the first box of a tensor, is in."""
        if name in self.index.tensors:
            return self.index.places(name)[0].file
        return self.index.place(name).file

    def object(self, name: str) -> Any:  # noqa: ANN401 - whatever was saved
        """Return an object; runs no code from the file."""
        place = self.index.place(name)
        return self._open(place).read_object(name, place.start_byte, place.length_bytes)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, on the CPU."""
        known = self.index.tensors[name]
        out = torch.empty(known.size, dtype=known.properties.dtype)
        self.fill([(name, (0,) * out.ndim, out)])
        return out

    def value(self, name: str) -> Any:  # noqa: ANN401 - whatever was saved
        """Return an object or a whole tensor."""
        return self.tensor(name) if name in self.index.tensors else self.object(name)

    def fill(self, targets: Iterable[tuple[str, tuple[int, ...], torch.Tensor]]) -> None:
        """Read boxes - (stored name, first index, memory) - in the order they have in files.

        Memory: one stored box.
        """
        wanted: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = defaultdict(list)
        for name, offset, memory in targets:
            if memory.numel():
                wanted[name].append((offset, memory))
        by_box: dict[Place, list[_Read]] = defaultdict(list)
        for name, boxes in wanted.items():
            for read in self._plan(name, boxes):
                by_box[read.place].append(read)
        for place in sorted(by_box, key=lambda place: (place.file, place.start_byte)):
            reads = by_box[place]
            self._open(place).read_tensor(reads[0].stored, [read.target for read in reads])

    def fill_parts(self, parts: Iterable[tuple[str, Part]]) -> None:
        """Read parts under the names that they have in the checkpoint."""
        self.fill((name, part.offset, part.tensor) for name, part in parts)

    def _plan(
        self, name: str, boxes: list[tuple[tuple[int, ...], torch.Tensor]]
    ) -> Iterable[_Read]:
        """Yield what has to be read to fill some boxes of a tensor."""
        known: TensorStorageMetadata = self.index.tensors[name]
        local = [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=memory.shape)
            for offset, memory in boxes
        ]
        for item in create_read_items_for_chunk_list(name, known, local):
            number, stored = item.dest_index.index, item.storage_index
            assert number is not None
            assert stored.index is not None
            assert stored.offset is not None
            place = self.index.place(name, stored.offset)
            box = StoredBox(
                name=name,
                start_byte=place.start_byte,
                length_bytes=place.length_bytes,
                size=tuple(known.chunks[stored.index].sizes),
                dtype=known.properties.dtype,
            )
            memory = boxes[number][1][_slices(item.dest_offsets, item.lengths)]
            target = Target(source=_slices(item.storage_offsets, item.lengths), memory=memory)
            yield _Read(place=place, stored=box, target=target)

    def _open(self, place: Place) -> DataReader:
        """Return the open file of a place; one is open at a time."""
        if self._open_file is None or self._open_file[0] != place.file:
            self.close()
            self._open_file = (
                place.file,
                DataReader(self.folder / place.file, is_plain=self._is_ours),
            )
        return self._open_file[1]


def _slices(offsets: Iterable[int], lengths: Iterable[int]) -> tuple[slice, ...]:
    """Return the slices of one rectangle."""
    pairs = zip(offsets, lengths, strict=True)
    return tuple(slice(offset, offset + length) for offset, length in pairs)
