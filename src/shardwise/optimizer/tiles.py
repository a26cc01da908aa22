"""Cut the update of a chunk into tiles, so that what it casts and scales stays in the cache.

In 16-bit training an update is three passes over memory: widen the gradient, update, round the
result. Tile after tile they are one: what a pass leaves is in the processor's cache when the next
needs it, and no wide gradient of a whole chunk exists. The kernels are those of the wrapped
optimizer, and cuts are where they change no bit. See ADR 0008.

This module says where the cuts are, and lets the optimizer see parts of pieces; it runs nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.optimizer.pieces import is_whole_atom, shape_run

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from shardwise.layout import Piece
    from shardwise.runtime.managed import ManagedParameter

    PieceOf = Callable[[ManagedParameter], nn.Parameter | None]

TILE_NUMEL_PER_THREAD = 2**19
"""What must stay in the cache is a gradient and a master in float32: 4 MiB a thread. Threads meet
at the end of every call, so smaller tiles cost more of that; larger ones miss the caches of small
processors (``host_update``)."""
MAX_TILE_NUMEL = 2**21
"""16 MiB of these; caches that threads share do not grow with their number."""
CUT_NUMEL = 64
"""Pieces are cut at multiples of this many elements. Torch's fused kernels compute whole vectors in
another way than what is left at the end: an end must be where the whole piece has one. 64 elements
are whole vectors of every dtype."""


def tile_numel() -> int:
    """Return the elements of a tile, for the threads that there are."""
    return min(TILE_NUMEL_PER_THREAD * torch.get_num_threads(), MAX_TILE_NUMEL)


class Part(NamedTuple):
    """Elements ``[start, stop)`` of a slice that belong to one piece."""

    record: ManagedParameter
    start: int
    stop: int
    is_piece: bool
    """It is the whole piece."""


class Tile(NamedTuple):
    """Elements ``[start, stop)`` of a slice, and the pieces in it that are updated."""

    start: int
    stop: int
    parts: tuple[Part, ...]


def cut_tiles(
    records: Iterable[ManagedParameter], slice_numel: int, *, tile_numel: int
) -> list[Tile] | None:
    """Return tiles that cover a slice, or None where one would cut what has to stay whole.

    Args:
        records: Members of one chunk that are updated.
        slice_numel: Elements of the rank's slice.
        tile_numel: Most elements of a tile, at least ``CUT_NUMEL``.
    """
    owned = [(record.piece, record) for record in records if record.piece is not None]
    owned = sorted(
        ((piece, record) for piece, record in owned if piece.numel),
        key=lambda one: one[0].slice_start,
    )
    tiles: list[Tile] = []
    first = start = 0
    while start < slice_numel:
        while first < len(owned) and owned[first][0].slice_stop <= start:
            first += 1
        stop = _end_of_tile(start, min(start + tile_numel, slice_numel), owned[first:])
        parts: list[Part] = []
        for piece, record in owned[first:]:
            if piece.slice_start >= stop:
                break
            low, high = max(start, piece.slice_start), min(stop, piece.slice_stop)
            is_piece = high - low == piece.numel
            if not is_piece and is_whole_atom(record):
                return None
            parts.append(Part(record, low, high, is_piece))
        tiles.append(Tile(start, stop, tuple(parts)))
        start = stop
    return tiles


def _end_of_tile(start: int, stop: int, owned: Sequence[tuple[Piece, ManagedParameter]]) -> int:
    """Return where a tile ends that would end at ``stop``: where a piece may be cut."""
    for piece, _ in owned:
        if piece.slice_start >= stop:
            break
        if piece.slice_stop > stop:
            allowed = piece.slice_start + (stop - piece.slice_start) // CUT_NUMEL * CUT_NUMEL
            return allowed if allowed > start else stop
    return stop


class Parts:
    """Parameters that stand for parts of pieces, and the state of these pieces cut alike."""

    def __init__(self, optimizer: torch.optim.Optimizer, piece_of: PieceOf) -> None:
        """Serve the update of one chunk."""
        self._optimizer = optimizer
        self._piece_of = piece_of
        self._made: dict[nn.Parameter, dict[str, Any]] = {}
        """By piece: entries of its state that ``finish`` sets."""

    @contextmanager
    def shown(
        self, tile: Tile, gradient: torch.Tensor
    ) -> Generator[list[tuple[nn.Parameter, nn.Parameter]]]:
        """Yield (piece, what stands for it in the tile), with gradients; keep new state after."""
        stands: list[tuple[Part, nn.Parameter, nn.Parameter]] = []
        try:
            for part in tile.parts:
                piece = self._piece_of(part.record)
                assert piece is not None
                seen = piece if part.is_piece else self._stand_for(part, piece)
                stands.append((part, piece, seen))
                run = gradient[part.start - tile.start : part.stop - tile.start]
                seen.grad = shape_run(part.record, run) if part.is_piece else run
            yield [(piece, seen) for _, piece, seen in stands]
            for part, piece, seen in stands:
                if seen is not piece:
                    self._keep(part, piece, seen)
        finally:
            for _, piece, seen in stands:
                seen.grad = None
                if seen is not piece:
                    self._optimizer.state.pop(seen, None)

    def _stand_for(self, part: Part, piece: nn.Parameter) -> nn.Parameter:
        """Return a parameter for a part of a piece, with the state that the piece has."""
        seen = nn.Parameter(_cut(piece.detach(), part))
        state = self._optimizer.state.get(piece)
        if state:
            self._optimizer.state[seen] = {
                name: _part_of(value, piece, part) for name, value in state.items()
            }
        return seen

    def _keep(self, part: Part, piece: nn.Parameter, seen: nn.Parameter) -> None:
        """Copy new state of a part to its place; what is a view of its place is there already."""
        known = self._optimizer.state.get(piece, {})
        made = self._made.setdefault(piece, {})
        for name, value in self._optimizer.state.get(seen, {}).items():
            if not _is_cut_like(value, seen):
                made[name] = value  # a counter, the same for every part
                continue
            whole = known.get(name)
            if not _is_cut_like(whole, piece):
                whole = made.get(name)
                if whole is None:
                    whole = made[name] = torch.empty_like(piece, dtype=value.dtype)
            place = _cut(whole, part)
            if value.untyped_storage()._cdata != place.untyped_storage()._cdata:
                place.copy_(value)

    def finish(self) -> None:
        """Set what does not lie in place: counters, and state that is new."""
        for piece, made in self._made.items():
            state = self._optimizer.state[piece]
            for name, value in made.items():
                known = state.get(name)
                if isinstance(known, torch.Tensor) and _is_cut_like(value, known):
                    known.copy_(value)
                else:
                    state[name] = value
        self._made = {}


def _cut(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the part of a tensor that is as long as its piece."""
    assert part.record.piece is not None
    return whole.narrow(0, part.start - part.record.piece.slice_start, part.stop - part.start)


def _is_cut_like(value: object, like: torch.Tensor) -> bool:
    """Return whether a state value has an element for each of a parameter."""
    return isinstance(value, torch.Tensor) and value.shape == like.shape


def _part_of(value: Any, piece: nn.Parameter, part: Part) -> Any:  # noqa: ANN401 - any state value
    """Return a state value for a part: a view, or a counter of its own."""
    if _is_cut_like(value, piece):
        return _cut(value, part)
    return value.clone() if isinstance(value, torch.Tensor) else value
