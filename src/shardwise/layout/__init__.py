"""Geometry of sharding: where parameters lie in chunks, and who owns which part.

Integers only; nothing here knows of tensors, dtypes or processes.
"""

from shardwise.layout.boxes import Box, cover
from shardwise.layout.common_size import search_chunk_size
from shardwise.layout.packing import ChunkLayout, Item, Piece, Slot, pack
from shardwise.layout.search import choose_capacity, search_chunk_numel

__all__ = [
    "Box",
    "ChunkLayout",
    "Item",
    "Piece",
    "Slot",
    "choose_capacity",
    "cover",
    "pack",
    "search_chunk_numel",
    "search_chunk_size",
]
