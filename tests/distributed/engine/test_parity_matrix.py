"""Stage x precision x accumulation x no_sync x clipping x ranks, against one process.

Without clipping the order of arithmetic is that of one process, so every bit must be equal.
Clipping multiplies by a coefficient whose norm was summed in another order: updates then agree to
rounding.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.kit.models import CASES
from tests.kit.sharded import Setting, adamw, assert_like_one_process, fused_adamw, momentum_sgd

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS = [(None, None), (BF16, None), (BF16, FP32), (FP16, None), (FP16, FP32)]
SMALL_CHUNKS = {"chunk_bytes": 20_000}


@pytest.mark.world_size(1, 2, 3, 4, timeout_s=90)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_precision_and_accumulation_is_bit_equal(stage: int) -> None:
    accumulation = [(1, False), (3, False), (3, True)]
    for (param, reduce), (count, no_sync) in itertools.product(PRECISIONS, accumulation):
        setting = Setting(
            stage=stage,
            param_dtype=param,
            reduce_dtype=reduce,
            num_micro_batches=count,
            no_sync=no_sync,
            options=SMALL_CHUNKS,
        )
        assert_like_one_process(CASES["gpt"], adamw, setting)


@pytest.mark.world_size(1, 2, 3, 4, timeout_s=90)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_model_is_bit_equal(stage: int) -> None:
    for case in CASES.values():
        setting = Setting(stage=stage, num_micro_batches=2, options=SMALL_CHUNKS)
        assert_like_one_process(case, momentum_sgd, setting)


@pytest.mark.world_size(1, 2, 3, 4, timeout_s=90)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_optimizer_alone_is_bit_equal(stage: int) -> None:
    for name, make in itertools.product(["mlp", "gpt-reentrant", "odd-shapes"], [adamw]):
        for no_sync in (False, True):
            setting = Setting(
                stage=stage,
                face="optimizer",
                num_micro_batches=2,
                no_sync=no_sync,
                options=SMALL_CHUNKS,
            )
            assert_like_one_process(CASES[name], make, setting)


@pytest.mark.world_size(2, 3, 4, timeout_s=90)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_twenty_steps_are_bit_equal(stage: int) -> None:
    for make in (momentum_sgd, adamw, fused_adamw):
        setting = Setting(stage=stage, num_steps=20, options=SMALL_CHUNKS)
        assert_like_one_process(CASES["gpt"], make, setting)


@pytest.mark.world_size(1, 2, 3, 4, timeout_s=90)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_by_any_norm_is_that_of_one_process(stage: int) -> None:
    for norm_type, (param, reduce), count in itertools.product(
        (1.0, 2.0, 3.0, math.inf), [(None, None), (BF16, FP32)], (1, 2)
    ):
        limit = 0.05 if norm_type > 1 else 1.0
        setting = Setting(
            stage=stage,
            clip_grad_norm=limit,
            norm_type=norm_type,
            param_dtype=param,
            reduce_dtype=reduce,
            num_micro_batches=count,
            options=SMALL_CHUNKS,
        )
        # SGD: a step moves by lr * clipped gradient, at most 5e-3 here; 1e-7 is its rounding
        assert_like_one_process(CASES["gpt"], momentum_sgd, setting, atol=3e-7)


@pytest.mark.world_size(4, timeout_s=90)
@pytest.mark.parametrize("shard_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_hybrid_meshes_agree_with_one_process(stage: int, shard_size: int) -> None:
    # sums run inside the shard group first: ((0+1)+(2+3)) is not ((0+1)+2)+3
    for param, reduce in [(None, None), (BF16, FP32)]:
        setting = Setting(
            stage=stage,
            num_micro_batches=2,
            param_dtype=param,
            reduce_dtype=reduce,
            options={"shard_size": shard_size, **SMALL_CHUNKS},
        )
        exact = shard_size != 2
        make = adamw if exact else momentum_sgd
        bound = 0.0 if exact else (1e-6 if param is None else 1e-3)
        assert_like_one_process(CASES["gpt"], make, setting, atol=bound)
