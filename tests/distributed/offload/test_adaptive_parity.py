"""Budgets change no bit and are never crossed: every stage, tier, precision and kind of step."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.kit.budgets import smallest, with_budget
from tests.kit.models import CASES
from tests.kit.offloaded import use_hostile_tiers
from tests.kit.oracle import assert_bit_equal
from tests.kit.sharded import (
    Setting,
    adamw,
    assert_like_one_process,
    assert_within_limits,
    build,
    fused_adamw,
    momentum_sgd,
    run_step,
    updated_values,
)

pytestmark = pytest.mark.timeout(300)
"""Each test looks for the smallest budgets first, which takes several short runs."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL_CHUNKS = {"chunk_bytes": 6_000}


def budgets(setting: Setting, make, folder, kinds: str, *, case=CASES["gpt"]) -> list[dict]:
    """Return budgets of some kinds: the least on the accelerator, or a part of the state more, with
    host memory enough for the rest, or with the least of that and a disk.
    """
    least = smallest("accelerator", case, make, setting)
    numel = sum(p.numel() for p in case.build().parameters())
    part = least + 5 * numel // dist.get_world_size()
    found = []
    for kind in kinds.split():
        budget = {"accelerator": least if kind.startswith("least") else part}
        if kind.endswith("disk"):
            budget |= {"disk_path": folder}
            budget |= {"host": smallest("host", case, make, setting, **budget)}
        found.append(budget)
    return found


@pytest.mark.world_size(1, 2, 3, timeout_s=280)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_twenty_steps_are_bit_equal_in_every_tier(stage, tmp_path, monkeypatch) -> None:
    kinds = ("least part-disk", "least-disk part")
    for number, (param, reduce) in enumerate([(None, None), (BF16, FP32)]):
        use_hostile_tiers(monkeypatch, seed=number)
        setting = Setting(
            stage=stage,
            num_steps=20,
            num_micro_batches=1 + 2 * (stage % 2),
            param_dtype=param,
            reduce_dtype=reduce,
            options=SMALL_CHUNKS,
        )
        for budget in budgets(setting, fused_adamw, tmp_path, kinds[number]):
            assert_like_one_process(CASES["gpt"], fused_adamw, with_budget(setting, **budget))


@pytest.mark.world_size(2, timeout_s=280)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_precision_and_accumulation_is_bit_equal(stage, tmp_path, monkeypatch) -> None:
    use_hostile_tiers(monkeypatch, seed=stage)
    precisions = [(None, None), (BF16, None), (FP16, FP32)]
    accumulations = itertools.cycle([(1, False), (3, True)][:: 1 if stage % 2 else -1])
    for (param, reduce), (count, no_sync) in zip(precisions, accumulations, strict=False):
        setting = Setting(
            stage=stage,
            param_dtype=param,
            reduce_dtype=reduce,
            num_micro_batches=count,
            no_sync=no_sync,
            options=SMALL_CHUNKS,
        )
        for budget in budgets(setting, adamw, tmp_path, "least-disk part"):
            assert_like_one_process(CASES["gpt"], adamw, with_budget(setting, **budget))


@pytest.mark.world_size(2, timeout_s=280)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_model_is_bit_equal(stage, tmp_path, monkeypatch) -> None:
    use_hostile_tiers(monkeypatch, seed=stage)
    for number, case in enumerate(CASES.values()):
        kinds = ("least-disk", "part")[(number + stage) % 2]
        setting = Setting(stage=stage, num_micro_batches=2, options=SMALL_CHUNKS)
        for budget in budgets(setting, momentum_sgd, tmp_path, kinds, case=case):
            assert_like_one_process(case, momentum_sgd, with_budget(setting, **budget))


@pytest.mark.world_size(2, timeout_s=280)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_optimizer_alone_keeps_budgets_too(stage, tmp_path) -> None:
    kinds = "least least-disk part part-disk"
    setting = Setting(stage=stage, face="optimizer", num_micro_batches=2, options=SMALL_CHUNKS)
    for budget in budgets(setting, adamw, tmp_path, kinds, case=CASES["odd-shapes"]):
        assert_like_one_process(CASES["odd-shapes"], adamw, with_budget(setting, **budget))


@pytest.mark.world_size(2, timeout_s=280)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_is_that_of_the_run_without(stage, tmp_path) -> None:
    """Norms are summed in another order than in one process; where state lies is no part of it."""
    for param, reduce in [(None, None), (BF16, FP32)]:
        setting = Setting(
            stage=stage,
            param_dtype=param,
            reduce_dtype=reduce,
            clip_grad_norm=0.05,
            options=SMALL_CHUNKS,
        )
        expected = train(setting)
        for budget in budgets(setting, adamw, tmp_path, "least part-disk"):
            assert_bit_equal(train(with_budget(setting, **budget)), expected, what=str(budget))


def train(setting) -> dict[str, torch.Tensor]:
    """Return parameters and state after three steps."""
    case = CASES["gpt"]
    model, optimizer = build(case, adamw, setting)
    for step in range(3):
        run_step(model, optimizer, case, setting, step)
    assert_within_limits(optimizer)
    values = updated_values(model, optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        values |= {f"{index}.{name}": value for name, value in state.items()}
    return values
