"""Under tiers whose copies land late and whose undefined memory is NaN every bit is the same."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from tests.distributed.offload.test_static_parity import BF16, FP32, SMALL_CHUNKS, choices
from tests.kit.models import CASES
from tests.kit.offloaded import use_hostile_tiers
from tests.kit.sharded import Setting, adamw, assert_like_one_process, fused_adamw


@pytest.mark.world_size(2, 3, timeout_s=90)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_twenty_steps_are_bit_equal(stage, tmp_path, monkeypatch) -> None:
    for number, offload in enumerate(choices(stage, tmp_path)):
        use_hostile_tiers(monkeypatch, seed=number)
        setting = Setting(
            stage=stage,
            num_steps=20,
            num_micro_batches=1 + 2 * (number % 2),
            options=SMALL_CHUNKS | {"offload": offload},
        )
        assert_like_one_process(CASES["gpt"], fused_adamw, setting)


@pytest.mark.world_size(1, 2, timeout_s=90)
@pytest.mark.parametrize("stage", [2, 3])
def test_sixteen_bit_masters_are_bit_equal(stage, tmp_path, monkeypatch) -> None:
    for number, offload in enumerate(choices(stage, tmp_path)):
        use_hostile_tiers(monkeypatch, seed=number)
        for param, reduce in [(BF16, FP32), (torch.float16, None)]:
            setting = Setting(
                stage=stage,
                param_dtype=param,
                reduce_dtype=reduce,
                num_micro_batches=3,
                no_sync=True,
                options=SMALL_CHUNKS | {"offload": offload},
            )
            assert_like_one_process(CASES["gpt"], adamw, setting)


@pytest.mark.world_size(2)
def test_a_missing_wait_is_noticed(tmp_path, monkeypatch) -> None:
    """The stand-in can fail: without the wait for a read, an update sees NaN."""
    from shardwise.runtime.state_slices import StateSlices

    def bring(self, entry) -> None:
        if entry.near is not None:
            entry.reading = None
            return
        real(self, entry)

    real = StateSlices._bring
    use_hostile_tiers(monkeypatch)
    monkeypatch.setattr(StateSlices, "_bring", bring)
    torch.manual_seed(0)
    choice = sw.StaticOffload(optimizer=1.0, to="disk", disk_path=tmp_path)
    model = sw.shard(CASES["gpt"].build(), stage=2, offload=choice)
    optimizer = sw.ShardedOptimizer(adamw(model))

    def train() -> None:
        for _ in range(2):
            optimizer.backward(CASES["gpt"].loss(model))
            optimizer.step()
            optimizer.zero_grad()
            assert not any(p.isnan().any() for p in model.parameters()), "NaN"

    with pytest.raises(Exception, match=r"NaN|under way"):
        train()
