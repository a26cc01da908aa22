"""What is written and read: boxes of named tensors, and small objects; nothing here does either.

A ``Part`` is a box of a tensor together with the memory on this rank that holds it. Saving reads
these views and loading writes them, so both walk the same list.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.errors import CheckpointError, mismatch
from shardwise.layout import cover

if TYPE_CHECKING:
    from shardwise.runtime.managed import ManagedParameter


_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A box of a tensor on this rank."""

    names: tuple[str, ...]
    """Names of the tensor; a tied parameter has several."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """First index of the box in every dim."""
    tensor: torch.Tensor
    """The memory, of the box's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """An object that is no tensor, encoded."""

    names: tuple[str, ...]
    data: bytes


Entry = Part | Thing


def whole(names: tuple[str, ...], tensor: torch.Tensor) -> Part:
    """Return the one part of a tensor that is whole on this rank."""
    return Part(names=names, shape=tuple(tensor.shape), offset=(0,) * tensor.ndim, tensor=tensor)


def parts_of_piece(
    names: tuple[str, ...], record: ManagedParameter, values: torch.Tensor
) -> list[Part]:
    """Return the boxes of a parameter's piece as views of a tensor that is cut like it.

    Args:
        names: Of the parameter, or of the state that is cut like it.
        record: The parameter.
        values: The piece, 1-D in the order of memory.
    """
    piece = record.piece
    assert piece is not None
    start = piece.parameter_start
    corner = _corner(record)
    shape = tuple(record.parameter.shape)
    parts: list[Part] = []
    for box in cover(start, start + piece.numel, record.shape, record.stride):
        rows = values.narrow(0, box.start, box.numel).view([box.size[dim] for dim in box.order])
        view = rows.permute([box.order.index(dim) for dim in range(len(box.order))])
        offset = tuple(a + b for a, b in zip(corner, box.offset, strict=True))
        parts.append(Part(names=names, shape=shape, offset=offset, tensor=view))
    return parts


def part_of_whole_atom(
    names: tuple[str, ...], record: ManagedParameter, value: torch.Tensor
) -> Part:
    """Return a state of the shape of a parameter that is never cut."""
    shape = tuple(record.parameter.shape)
    return Part(names=names, shape=shape, offset=_corner(record), tensor=value)


def _corner(record: ManagedParameter) -> tuple[int, ...]:
    """Return where the values on this rank begin in a parameter that other axes split."""
    parameter = record.parameter
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(offset)


def writes(record: ManagedParameter) -> bool:
    """Return whether this rank writes its piece: one replica does."""
    return record.engine.topology.replicate.rank == 0 and record.is_counted


def encode(name: str, value: object) -> bytes:
    """Return an object as DCP stores it, if it can be read back without running code.

    Raises:
        CheckpointError: It holds something other than numbers, strings, tensors and containers.
    """
    stream = io.BytesIO()
    try:
        torch.save(_plain(value), stream)
        data = stream.getvalue()
        decode(name, data)
    except (CheckpointError, pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            mismatch(
                f"{name!r}",
                expected="numbers, strings, tensors, and containers of these",
                got=f"a {type(value).__name__} that only unpickling could read back",
                fix="save its state_dict() instead",
            )
        ) from error
    return data


def decode(name: str, data: bytes | bytearray) -> Any:  # noqa: ANN401 - whatever was saved
    """Return the object behind some bytes; runs no code from them.

    Raises:
        CheckpointError: The bytes are no such object.
    """
    try:
        if not data.startswith(_ZIP):
            raise pickle.UnpicklingError("something that torch.save does not write")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged data may fail in any way
        raise CheckpointError(
            mismatch(
                f"{name!r}",
                expected="an object that needs no code to be read",
                got=str(error).splitlines()[0],
                fix="save it again as numbers, strings, tensors and containers of these",
            )
        ) from error


def _plain(value: object) -> object:
    """Return numbers that come as a subclass (of numpy) as plain ones."""
    if isinstance(value, float) and type(value) is not float:
        return float(value)
    if type(value) is list:
        return [_plain(one) for one in value]
    if type(value) is tuple:
        return tuple(_plain(one) for one in value)
    if type(value) is dict:
        return {key: _plain(one) for key, one in value.items()}
    return value
