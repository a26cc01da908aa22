"""The engine runs without values: shapes and bytes of a rank of many, in seconds."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import shardwise as sw
from benchmarks import dry_run


def test_a_rank_of_many_is_measured_without_the_others(capsys) -> None:
    for num_ranks in (8, 64):
        result = dry_run.dry_run(dry_run.SHAPES["tiny"], num_ranks=num_ranks, sequence=16)
        share = result.numel / num_ranks
        padding = 4096  # a few chunks, each cut into aligned slices
        assert 2 * share <= result.held.parameters <= 2 * share + padding
        assert 12 * share <= result.held.optimizer_state <= 12 * share + 6 * padding
        assert result.held.gradients == 0
        assert result.gathered_peak_bytes > 0
        assert not dist.is_initialized()
    dry_run.main(["--size", "tiny", "--ranks", "16"])
    assert "gathered, peak" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["host", "disk"])
def test_what_would_rest_elsewhere_is_counted_there(to, tmp_path) -> None:
    place = tmp_path if to == "disk" else None
    offload = sw.StaticOffload(optimizer=1.0, parameters=1.0, to=to, disk_path=place)
    shape = dry_run.SHAPES["tiny"]
    result = dry_run.dry_run(shape, num_ranks=8, sequence=16, offload=offload)
    share, padding = result.numel / 8, 4096
    resting = result.held.host if to == "host" else result.held.disk
    assert 14 * share <= resting <= 14 * share + 7 * padding
    assert result.held.parameters == result.held.gradients == 0
