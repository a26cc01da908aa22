"""Let ranks wait for each other's gradients in the middle of a backward pass without a deadlock.

Under a limit a rank waits for one chunk's reduction before it sends the next but one, so that what
it holds depends on no thread's pace. Ranks that use other parameters, or have no pass at all, must
then send the chunks that the others wait for: they agree on every pass when it begins, and send all
that is expected before they agree on what came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runtime.agreement import is_true_anywhere
from shardwise.runtime.divergence import explain

if TYPE_CHECKING:
    from shardwise.runtime.divergence import Whereabouts
    from shardwise.runtime.topology import Topology


class Lockstep:
    """Agrees on passes that begin, where ranks wait inside of them."""

    def __init__(self, topology: Topology, whereabouts: Whereabouts, *, is_on: bool) -> None:
        """Serve one reducer; what is off agrees on nothing."""
        self.is_on = is_on
        self._topology = topology
        self._whereabouts = whereabouts

    def begin(self) -> None:
        """Tell the others that this rank begins a pass. Collectives: one all-reduce of a flag."""
        self._agree(True)

    def must_join(self) -> bool:
        """Before a step: return whether another rank begins a pass. Collectives: as ``begin``."""
        return self._agree(False)

    def _agree(self, begins: bool) -> bool:
        """Return whether some rank begins a pass."""
        if not self.is_on:
            return False
        self._whereabouts.note("begin of a backward pass" if begins else "start of a step")
        with explain(self._whereabouts):
            return is_true_anywhere(begins, self._topology)
