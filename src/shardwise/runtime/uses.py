"""The order in which chunks are used, recorded pass by pass and used to look ahead; no torch.

A *segment* is one forward (with or without gradients) or one backward pass. What a segment used the
last time predicts its next run until the first difference, after which the rest is recorded anew.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

from shardwise.residency import Segment

ItemT = TypeVar("ItemT")


class UseOrder(Generic[ItemT]):
    """Records uses and tells what comes next."""

    def __init__(self) -> None:
        """Know nothing."""
        self.segment = Segment.EVALUATION
        self._known: dict[Segment, list[ItemT]] = {}
        self._positions: dict[ItemT, list[int]] | None = None
        self._seen: list[ItemT] = []

    def begin(self, segment: Segment) -> None:
        """End the current segment, keep its record, and start another."""
        if self._seen:
            self._known[self.segment] = self._seen
        self.segment, self._seen = segment, []
        known = self._known.get(segment)
        self._positions = None
        if known is not None:
            self._positions = {}
            for position, item in enumerate(known):
                self._positions.setdefault(item, []).append(position)

    def note(self, item: ItemT) -> None:
        """Record a use; repeated uses in a row count once."""
        if self._seen and self._seen[-1] is item:
            return
        self._seen.append(item)
        if self._positions is not None:
            known, position = self._known[self.segment], len(self._seen) - 1
            if position >= len(known) or known[position] is not item:
                self._positions = None

    @property
    def is_predicting(self) -> bool:
        """True while the segment has followed its record."""
        return self._positions is not None

    def next_use(self, item: ItemT) -> int | None:
        """Return how many uses ahead the item is expected, None if it is not."""
        if self._positions is None:
            return None
        positions = self._positions.get(item, [])
        at = len(self._seen) - 1
        after = bisect_right(positions, at)
        return positions[after] - at if after < len(positions) else None

    def upcoming(self) -> list[ItemT]:
        """Return the uses expected in the rest of the segment, soonest first."""
        if self._positions is None:
            return []
        return self._known[self.segment][len(self._seen) :]
