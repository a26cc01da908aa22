"""A rank that has died leaves no note; the others wait for one, once, and not for long."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.runtime import divergence
from shardwise.runtime.divergence import Whereabouts, explain

BROKEN = "Read error [127.0.0.1]:1: Connection reset by peer"
SLOW = "Timed out waiting 1000ms for recv operation to complete"


@dataclass
class Clock:
    """Time that passes in sleep alone."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def fail(whereabouts: Whereabouts, message: str) -> None:
    with explain(whereabouts):
        raise RuntimeError(message)


@pytest.mark.world_size(3)
@pytest.mark.parametrize(("message", "patience_s"), [(BROKEN, 3), (SLOW, 10)])
def test_nobody_is_waited_for_twice(message, patience_s, monkeypatch) -> None:
    """Two ranks are silent, and cost no more than one."""
    whereabouts = sw.shard(nn.Linear(2, 2), stage=2)._shardwise.whereabouts
    clock = Clock()
    monkeypatch.setattr(divergence, "time", clock)
    if dist.get_rank() == 0:
        for _ in range(2):
            with pytest.raises(sw.DivergenceError, match=r"rank 2 gave no answer.*has ended"):
                fail(whereabouts, message)
            assert patience_s <= clock.now_s < patience_s + 1
    dist.barrier()


@pytest.mark.world_size(2)
def test_a_store_that_is_gone_hides_no_error(monkeypatch) -> None:
    whereabouts = sw.shard(nn.Linear(2, 2), stage=2)._shardwise.whereabouts

    def refuse(*_: object) -> None:
        raise dist.DistNetworkError("the server of the store is gone")

    monkeypatch.setattr(dist.Store, "set", refuse)
    monkeypatch.setattr(dist.PrefixStore, "set", refuse, raising=False)
    with pytest.raises(RuntimeError, match="reset by peer"):
        fail(whereabouts, BROKEN)
