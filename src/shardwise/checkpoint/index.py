"""DCP's index of a checkpoint: where which box of which tensor lies. Written as it is, read safely.

DCP pickles it. It is unpickled here by an allow-list of names that can do nothing but describe
tensors; whatever else a file asks for is refused before it is called.
"""

from __future__ import annotations

import collections
import io
import math
import pathlib
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shardwise.checkpoint.data_file import FileReport, Written

INDEX = ".metadata"
OPTIMIZER = "optimizer."
STATE = f"{OPTIMIZER}state."
GROUPS = f"{OPTIMIZER}param_groups."
OF_OPTIMIZER = (STATE, GROUPS)
"""What names of an optimizer begin with; a module may be called ``optimizer`` as well."""
_DCP_VERSION = "1.0.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one box or object lies."""

    file: str
    start_byte: int
    length_bytes: int


class Index:
    """What a checkpoint contains."""

    def __init__(self, metadata: dcp.Metadata) -> None:
        """Describe it by DCP's metadata, already checked."""
        self._metadata = metadata
        described = metadata.state_dict_metadata
        self.names = frozenset(described)
        """Of tensors and objects."""
        self.tensors = {
            name: entry
            for name, entry in described.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }
        """What is known of every tensor."""
        self.files = frozenset(info.relative_path for info in metadata.storage_data.values())
        """Names of the files that hold them."""

    def place(self, name: str, offset: Iterable[int] | None = None) -> Place:
        """Return where a box (by its offset) or an object lies."""
        key = dcp.MetadataIndex(name, None if offset is None else tuple(offset))
        info = self._metadata.storage_data[key]
        return Place(file=info.relative_path, start_byte=info.offset, length_bytes=info.length)

    def places(self, name: str) -> tuple[Place, ...]:
        """Return where all boxes of a tensor lie: tied tensors lie in the same places."""
        return tuple(self.place(name, box.offsets) for box in self.tensors[name].chunks)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, None for an object or an unknown name."""
        entry = self.tensors.get(name)
        return None if entry is None else tuple(entry.size)


def make_index(reports: Iterable[FileReport]) -> bytes:
    """Return the index file over what all ranks have written.

    Raises:
        CheckpointError: Some tensor is not covered exactly.
    """
    described: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, Any] = {}
    for report in reports:
        for entry in report.entries:
            info = filesystem._StorageInfo(report.name, entry.start_byte, entry.length_bytes)
            for name in entry.names:
                offset = None if entry.dtype is None else entry.offset
                key = dcp.MetadataIndex(name, offset)
                if key not in places:  # copies that ranks hold alike are written by several
                    places[key] = info
                    _describe(described, name, entry)
    for name, entry in described.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            _check_cover(name, entry)
    metadata = dcp.Metadata(
        state_dict_metadata=described,
        planner_data={name: _path_of(name) for name in described},
        storage_data=places,
        storage_meta=dcp.StorageMeta(),
        version=_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def read_index(folder: Path) -> Index:
    """Return the index of a folder; runs no code from it.

    Raises:
        CheckpointError: It is missing, asks for other names than descriptions of tensors need, or
            contradicts itself.
    """
    path = folder / INDEX
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(metadata, dcp.Metadata) or metadata.storage_data is None:
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        index = Index(metadata)
        for key, info in metadata.storage_data.items():
            if pathlib.PurePath(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"{key.fqn!r} lies outside of the folder")
            if info.transform_descriptors:
                raise pickle.UnpicklingError(f"{key.fqn!r} is compressed or encrypted")
        for name, entry in index.tensors.items():
            _check_cover(name, entry)
    except FileNotFoundError as error:
        raise _bad(path, "no such file") from error
    except Exception as error:  # a damaged pickle may ask for anything, and fail in any way
        raise _bad(path, str(error) or "a damaged one") from error
    return index


class _Unpickler(pickle.Unpickler):
    """Builds descriptions of tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as pickle declares it
        """Return one of the allowed names."""
        if module == "torch":
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
                return value
        found = _ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found


_ALLOWED: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.TensorStorageMetadata,
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.TensorProperties,
        dcp.StorageMeta,
        dcp._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        collections.OrderedDict,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
    )
} | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}


def _describe(described: dict[str, Any], name: str, entry: Written) -> None:
    """Add one box or object to the description."""
    if entry.dtype is None:
        described[name] = dcp.BytesStorageMetadata()
        return
    tensor = described.setdefault(
        name,
        dcp.TensorStorageMetadata(
            properties=dcp.TensorProperties(dtype=entry.dtype),
            size=torch.Size(entry.shape),
            chunks=[],
        ),
    )
    tensor.chunks.append(
        dcp.ChunkStorageMetadata(offsets=torch.Size(entry.offset), sizes=torch.Size(entry.size))
    )


def _check_cover(name: str, tensor: dcp.TensorStorageMetadata) -> None:
    """Refuse a tensor whose boxes do not add up to it."""
    stored_numel = sum(math.prod(box.sizes) for box in tensor.chunks)
    if stored_numel != math.prod(tensor.size):
        raise CheckpointError(
            mismatch(
                f"{name!r}",
                expected=f"{math.prod(tensor.size)} elements",
                got=stored_numel,
                fix="save and load with the same parameters on all ranks",
            )
        )


def _path_of(name: str) -> tuple[str | int, ...]:
    """Return the path in a nested state dict, as torchtitan nests it."""
    if not name.startswith(OF_OPTIMIZER):
        return (name,)
    rest = name.removeprefix(OPTIMIZER)
    kind, _, option = rest.partition(".")
    number, _, option = option.partition(".")
    is_of_list = number.isdigit() and "." not in option  # else a parameter, such as 0.weight
    if kind == "param_groups" and is_of_list:
        return ("optimizer", kind, int(number), option)
    return ("optimizer", rest)


def _bad(path: Path, got: str) -> CheckpointError:
    """Return the error for an index that cannot be used."""
    return CheckpointError(
        mismatch(
            f"checkpoint file {path}",
            expected="an index of tensors",
            got=got,
            fix="load another checkpoint: this one is none, or not to be trusted",
        )
    )
