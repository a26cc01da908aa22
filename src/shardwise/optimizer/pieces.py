"""Pieces, what the optimizer sees of one parameter on one rank, as views of flat slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.layout import Item

if TYPE_CHECKING:
    import torch

    from shardwise.runtime.managed import ManagedParameter


def shape_piece(record: ManagedParameter, slice_S: torch.Tensor) -> torch.Tensor:
    """Return the owned piece in a slice, with the parameter's shape where its atom is the whole."""
    piece = record.piece
    assert piece is not None
    return shape_run(record, slice_S.narrow(0, piece.slice_start, piece.numel))


def shape_run(record: ManagedParameter, run: torch.Tensor) -> torch.Tensor:
    """Return a piece whose elements are given, with the shape that the optimizer sees."""
    if is_whole_atom(record):
        return run.as_strided(record.shape, record.stride, run.storage_offset())
    return run


def shape_of_piece(record: ManagedParameter) -> tuple[int, ...]:
    """Return the shape of the owned piece."""
    assert record.piece is not None
    return tuple(record.shape) if is_whole_atom(record) else (record.piece.numel,)


def is_whole_atom(record: ManagedParameter) -> bool:
    """Return whether the parameter may never be cut."""
    return Item(index=0, numel=record.numel, atom_numel=record.atom_numel).is_whole
