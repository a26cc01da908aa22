"""Norms of a fixed run are those that plain PyTorch gave, at every stage and accumulation."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.distributed.reduction import golden_norms as golden
from tests.kit.pair import STAGES


def test_the_golden_file_is_what_plain_pytorch_gives() -> None:
    for count, norms in json.loads(golden.FILE.read_text()).items():
        assert golden.norms_of_one_process(int(count)) == pytest.approx(norms, rel=1e-10)


@pytest.mark.world_size(1, 2, 4, timeout_s=20)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_gradient_norms_stay_golden(num_micro_batches: int) -> None:
    """The joined batch is the same at every world size; float64 leaves only its own rounding."""
    expected = json.loads(golden.FILE.read_text())[str(num_micro_batches)]
    rank, share = dist.get_rank(), golden.NUM_SAMPLES // dist.get_world_size()
    for stage in STAGES:
        model = sw.shard(golden.make_model(), stage=stage)
        optimizer = sw.ShardedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=golden.LEARNING_RATE)
        )
        norms = []
        for step in range(golden.NUM_STEPS):
            for micro_batch in range(num_micro_batches):
                own = [t.split(share)[rank] for t in golden.batch(step, micro_batch)]
                loss = golden.loss_of(model, *own, num_micro_batches=num_micro_batches)
                optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        assert norms == pytest.approx(expected, rel=1e-10), f"stage {stage}"
