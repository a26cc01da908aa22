"""The engine runs without values: shapes and bytes of a rank of many, in seconds."""

from __future__ import annotations

import torch.distributed as dist

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
