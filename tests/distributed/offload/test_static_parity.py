"""What rests elsewhere changes no bit: every stage, tier, precision and kind of step."""

from __future__ import annotations

import itertools

import pytest
import torch

import shardwise as sw
from tests.kit.models import CASES
from tests.kit.oracle import assert_bit_equal
from tests.kit.sharded import (
    Setting,
    adamw,
    assert_like_one_process,
    build,
    fused_adamw,
    momentum_sgd,
    run_step,
    updated_values,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL_CHUNKS = {"chunk_bytes": 20_000}


def choices(stage: int, folder) -> list[sw.StaticOffload]:
    """Return everything and half of it, in each tier."""
    places = [{}, {"to": "disk", "disk_path": folder}]
    shares = [{"optimizer": 1.0}, {"optimizer": 0.5}]
    if stage == 3:
        shares += [{"optimizer": 1.0, "parameters": 1.0}, {"parameters": 0.5}]
    return [
        sw.StaticOffload(**share, **place) for share, place in itertools.product(shares, places)
    ]


@pytest.mark.world_size(1, 2, 3, timeout_s=90)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_home_is_bit_equal(stage, tmp_path) -> None:
    for offload in choices(stage, tmp_path):
        for param, reduce in [(None, None), (BF16, FP32)]:
            setting = Setting(
                stage=stage,
                param_dtype=param,
                reduce_dtype=reduce,
                num_micro_batches=2,
                options=SMALL_CHUNKS | {"offload": offload},
            )
            assert_like_one_process(CASES["gpt"], adamw, setting)


@pytest.mark.world_size(2, timeout_s=90)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_optimizer_alone_offloads_too(stage, tmp_path) -> None:
    for offload in choices(stage, tmp_path):
        setting = Setting(
            stage=stage,
            face="optimizer",
            num_micro_batches=2,
            options=SMALL_CHUNKS | {"offload": offload},
        )
        assert_like_one_process(CASES["odd-shapes"], adamw, setting)


@pytest.mark.world_size(2, 3, timeout_s=90)
@pytest.mark.parametrize("stage", [2, 3])
def test_twenty_steps_of_every_optimizer_are_bit_equal(stage, tmp_path) -> None:
    for make in (momentum_sgd, adamw, fused_adamw):
        for offload in choices(stage, tmp_path)[:2]:
            setting = Setting(
                stage=stage, num_steps=20, options=SMALL_CHUNKS | {"offload": offload}
            )
            assert_like_one_process(CASES["gpt"], make, setting)


@pytest.mark.world_size(2, timeout_s=90)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_precision_and_accumulation_is_bit_equal(stage, tmp_path) -> None:
    precisions = [(BF16, None), (FP16, FP32), (FP16, None)]
    for (param, reduce), (count, no_sync) in itertools.product(
        precisions, [(1, False), (3, False), (3, True)]
    ):
        for offload in choices(stage, tmp_path)[:2]:
            setting = Setting(
                stage=stage,
                param_dtype=param,
                reduce_dtype=reduce,
                num_micro_batches=count,
                no_sync=no_sync,
                options=SMALL_CHUNKS | {"offload": offload},
            )
            assert_like_one_process(CASES["gpt"], adamw, setting)


@pytest.mark.world_size(2, timeout_s=90)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_model_is_bit_equal(stage, tmp_path) -> None:
    for case in CASES.values():
        for offload in choices(stage, tmp_path)[:2]:
            setting = Setting(
                stage=stage, num_micro_batches=2, options=SMALL_CHUNKS | {"offload": offload}
            )
            assert_like_one_process(case, momentum_sgd, setting)


@pytest.mark.world_size(2, timeout_s=90)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_is_that_of_the_run_without(stage, tmp_path) -> None:
    """Norms are summed in another order than in one process; where state lies is no part of it."""
    for param, reduce in [(None, None), (BF16, FP32)]:
        options = {"stage": stage, "param_dtype": param, "reduce_dtype": reduce}
        expected = train(Setting(**options, clip_grad_norm=0.05, options=SMALL_CHUNKS))
        for offload in choices(stage, tmp_path):
            setting = Setting(
                **options, clip_grad_norm=0.05, options=SMALL_CHUNKS | {"offload": offload}
            )
            assert_bit_equal(train(setting), expected, what=str(offload))


def train(setting) -> dict[str, torch.Tensor]:
    """Return parameters and state after three steps."""
    case = CASES["gpt"]
    model, optimizer = build(case, adamw, setting)
    for step in range(3):
        run_step(model, optimizer, case, setting, step)
    values = updated_values(model, optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        values |= {f"{index}.{name}": value for name, value in state.items()}
    return values
