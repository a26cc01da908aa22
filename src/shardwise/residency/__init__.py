"""Decisions about memory: pure functions of sizes, limits and a recorded step. Nothing moves here.

=============  =====================================================================================
open           for
=============  =====================================================================================
``state``      tiers, the slices that a rank holds of a chunk, their sizes, limits and homes
``trace``      what one step uses, moment by moment; next uses; when to plan anew
``eviction``   at one moment: which gathered chunk to let go, which to gather ahead
``gathers``    all gathers of a step, by replaying ``eviction``
``policies``   the user's choice -> the home of every slice; fixed fractions
``adaptive``   a budget -> the home of every slice; the smallest budget that works
``staging``    how far moves run ahead and behind, and the bytes that their copies may take
``schedule``   trace and homes -> all moves of a step
``simulator``  a schedule -> bytes by tier and moment, bytes moved, and what is wrong with it
``presets``    the policies of an earlier memory manager by name
=============  =====================================================================================

Every rank calls these functions with equal arguments and so decides alike: slices are equally long
on all ranks, and measurements are agreed on before they come here.
"""

from __future__ import annotations

from shardwise.residency.adaptive import Needs, adapt, smallest_budget, spare_bytes
from shardwise.residency.eviction import (
    Foresight,
    Gathered,
    Prefetch,
    Room,
    choose_prefetches,
    choose_victims,
)
from shardwise.residency.gathers import Gather, foretell_gathers
from shardwise.residency.policies import choose_residency, divide
from shardwise.residency.presets import Fractions, Preset, find_preset
from shardwise.residency.schedule import Move, Schedule, Stay, make_schedule, update_tier
from shardwise.residency.simulator import Account, simulate
from shardwise.residency.staging import Pace, Staging, bound_staging
from shardwise.residency.state import (
    ChunkBytes,
    Limits,
    Purpose,
    Residency,
    State,
    Tier,
    reside,
    resolve_limits,
)
from shardwise.residency.trace import Moment, Segment, Trace, renew

__all__ = [
    "Account",
    "ChunkBytes",
    "Foresight",
    "Fractions",
    "Gather",
    "Gathered",
    "Limits",
    "Moment",
    "Move",
    "Needs",
    "Pace",
    "Prefetch",
    "Preset",
    "Purpose",
    "Residency",
    "Room",
    "Schedule",
    "Segment",
    "Staging",
    "State",
    "Stay",
    "Tier",
    "Trace",
    "adapt",
    "bound_staging",
    "choose_prefetches",
    "choose_residency",
    "choose_victims",
    "divide",
    "find_preset",
    "foretell_gathers",
    "make_schedule",
    "renew",
    "reside",
    "resolve_limits",
    "simulate",
    "smallest_budget",
    "spare_bytes",
    "update_tier",
]
