"""Agree with the other ranks on small sets of facts, such as which parameters were used.

A set is a Python integer used as a bit mask. In the usual case all ranks hold the same set, which
one all-reduce of a few numbers shows; only when they differ are the bits themselves exchanged.

A rank that ends a backward pass and a rank that already stands at ``step`` meet in the same call:
the second then knows that it must take part in the reduction of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.errors import BudgetError, ShardwiseError, mismatch
from shardwise.runtime.collectives import all_reduce_scalars
from shardwise.runtime.dry import is_dry_run

if TYPE_CHECKING:
    from shardwise.runtime.topology import Topology

_PRIME = 2**61 - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks said together."""

    mask: int
    """Union of the sets of the ranks that said the prevailing thing."""
    is_finishing: bool
    """Some rank ends a backward pass; if so, ``mask`` is about that."""
    is_same_order: bool = True
    """All ranks have gathered the same chunks in the same order."""


def agree(
    topology: Topology,
    *,
    num_bits: int,
    finishing_mask: int | None = None,
    step_mask: int = 0,
    order_print: int = 0,
) -> Verdict:
    """Return the union of the ranks' masks; ranks that finish a backward pass prevail.

    Args:
        topology: The ranks that must agree.
        num_bits: Length of every mask, equal on all ranks.
        finishing_mask: This rank's facts at the end of a backward pass, None at a step.
        step_mask: This rank's facts at a step.
        order_print: Fingerprint of what this rank has gathered since it last agreed.

    Collectives: one all-reduce of seven numbers per axis; one of ``num_bits`` bytes where ranks
    differ.
    """
    is_finishing = finishing_mask is not None
    finish = finishing_mask or 0
    if topology.size == 1 or is_dry_run():
        return Verdict(finish if is_finishing else step_mask, is_finishing)
    prints = (finish % _PRIME, step_mask % _PRIME, order_print)
    numbers = torch.tensor(
        [sign * number for number in prints for sign in (1, -1)] + [int(is_finishing)],
        dtype=torch.int64,
    )
    # chunks are gathered inside a shard group: replicas may do so differently
    all_reduce_scalars(numbers, (topology.shard,), maximum=True)
    numbers[4] = numbers[4] != -numbers[5]
    high, low, step_high, step_low, other_order, _, any_finishing = all_reduce_scalars(
        numbers, (topology.replicate,), maximum=True
    ).tolist()
    mask, differs = (finish, high != -low) if any_finishing else (step_mask, step_high != -step_low)
    if differs:
        mask = _union(mask, num_bits, topology)
    return Verdict(mask, bool(any_finishing), not other_order)


def fingerprints_agree(fingerprint: int, topology: Topology) -> bool:
    """Return, on all ranks alike, whether every rank passed the same number."""
    if is_dry_run():
        return True
    number = fingerprint % _PRIME
    numbers = torch.tensor([number, -number], dtype=torch.int64)
    high, low = all_reduce_scalars(numbers, topology.axes, maximum=True).tolist()
    return high == -low


def is_true_anywhere(fact: bool, topology: Topology) -> bool:
    """Return, on all ranks alike, whether some rank says so. Collectives: one all-reduce."""
    if topology.size == 1 or is_dry_run():
        return fact
    flag = torch.tensor([int(fact)], dtype=torch.int64)
    return bool(all_reduce_scalars(flag, topology.axes, maximum=True))


def raise_together(
    error: Exception | None, topology: Topology, *, kind: type[ShardwiseError] = BudgetError
) -> None:
    """Raise on every rank if one has an error. Collectives: one all-reduce of a number per axis."""
    if not is_true_anywhere(error is not None, topology):
        return
    raise error or kind(
        mismatch(
            "offload",
            expected="what it needs on every rank",
            got="a rank without, which has said why",
            fix="see the error of that rank",
        )
    )


def _union(mask: int, num_bits: int, topology: Topology) -> int:
    """Exchange the bits themselves."""
    data = bytearray(mask.to_bytes((num_bits + 7) // 8, "little"))
    bits = torch.tensor([data[i // 8] >> (i % 8) & 1 for i in range(num_bits)], dtype=torch.uint8)
    merged = all_reduce_scalars(bits, topology.axes, maximum=True).tolist()
    return sum(1 << i for i, bit in enumerate(merged) if bit)
