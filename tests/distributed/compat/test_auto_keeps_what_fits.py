"""The policy "auto": what fits stays on the accelerator, the rest goes, and no number changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.compat.colossalai import GeminiManager, ZeroDDP
from shardwise.errors import BudgetError
from shardwise.options import Budget
from tests.distributed.compat.gemini_kit import (
    adam,
    build,
    check,
    host_bytes,
    manager_of,
    numel_of,
    rounded_model,
    take_step,
)
from tests.distributed.compat.test_warm_up_sees_what_a_tracer_sees import traced
from tests.distributed.compat.zero_ddp_kit import exact, sgd
from tests.kit.models import CASES
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed

ROOMY = Budget(accelerator="1GiB")


def tight(name: str, *, dtype: torch.dtype = torch.bfloat16) -> Budget:
    """Return a budget for whole working values, activations and half of everything else."""
    numel = sum(p.numel() for p in CASES[name].build().parameters())
    size = 2 * dtype.itemsize * numel + 7 * numel // dist.get_world_size() + 30_000
    return Budget(accelerator=size)


def auto(budget: Budget, *, keep_gathered: bool = False) -> GeminiManager:
    """Make a manager for small chunks."""
    return manager_of("auto", keep_gathered=keep_gathered, chunk_numel=1000, budget=budget)


@pytest.mark.world_size(1, 2, 3, 4, timeout_s=120)
@pytest.mark.parametrize("keep_gathered", [False, True], ids=["scattered", "kept"])
def test_every_budget_is_bit_equal(world_size: int, keep_gathered: bool) -> None:
    for name in ("gpt", "gpt-reentrant", "gpt-non-reentrant"):
        for budget in (ROOMY, tight(name)):
            manager = auto(budget, keep_gathered=keep_gathered)
            check(CASES[name], manager, what=f"{budget}, {keep_gathered}, {name}")


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_an_empty_accelerator_keeps_everything_whatever_the_margin(world_size: int) -> None:
    """Also with a ratio of 0, which once meant that all state is updated on the host."""
    for ratio in (0.0, 0.5, 1.0):
        model, optimizer = check(
            CASES["gpt"], auto(ROOMY), what=f"{ratio}", gpu_margin_mem_ratio=ratio
        )
        take_step(model, optimizer, CASES["gpt"], 3)
        assert host_bytes(model) == 0, ratio


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_a_script_without_an_accelerator_runs_as_it_stands(world_size: int) -> None:
    """There is nothing of which 90% could be a limit."""
    model, _ = check(CASES["gpt"], manager_of("auto"), what="auto")
    assert torch.accelerator.is_available() or host_bytes(model) == 0


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_what_does_not_fit_rests_in_host_memory(world_size: int) -> None:
    model, optimizer = build(CASES["gpt"].build, manager=auto(tight("gpt")))
    for step in range(3):
        take_step(model, optimizer, CASES["gpt"], step)
    assert 0 < host_bytes(model) < 14 * numel_of(model) / world_size
    size = tight("gpt").accelerator
    assert isinstance(size, int)
    assert model.chunk_manager.total_mem["cuda"] <= size


@pytest.mark.world_size(2, timeout_s=60)
def test_a_budget_that_nothing_fits_into_is_refused_before_the_module_is_changed() -> None:
    torch.manual_seed(0)
    plain = CASES["gpt"].build()
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    with pytest.raises(BudgetError, match="raise Budget"):
        ZeroDDP(plain, auto(Budget(accelerator=100)))
    assert_bit_equal(dict(plain.named_parameters()), before)


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_evaluation_at_any_time_changes_no_later_step(world_size: int) -> None:
    case, dtype = CASES["gpt"], torch.bfloat16
    options = OracleOptions(world_size=world_size, param_dtype=dtype)
    records = run_oracle(case.build, adam, case.loss, options)
    torch.manual_seed(0)
    values = [dict(case.build().named_parameters()), *(record.parameters for record in records)]
    for budget in (ROOMY, tight("gpt")):
        calls: list[int] = []

        def evaluate(model: ZeroDDP, calls: list[int] = calls, budget: Budget = budget) -> None:
            plain = rounded_model(case, values[len(calls) // 2], dtype)
            calls.append(1)
            losses = []
            for one in (model, plain):
                seed(step=77, rank=0, micro_batch=0)
                with torch.no_grad():
                    losses.append(case.loss(one.eval()))
            assert torch.equal(*losses), (budget, len(calls))
            model.train()

        check(case, auto(budget), what=str(budget), between=evaluate)


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_state_continues_under_another_budget(world_size: int) -> None:
    case = CASES["gpt"]
    reference = build(case.build, manager=manager_of("cuda"))
    for step in range(2):
        take_step(*reference, case, step)
    weights = reference[0].state_dict(only_rank_0=False)
    state = reference[1].state_dict()
    take_step(*reference, case, 2)
    for budget in (ROOMY, tight("gpt")):
        model, optimizer = build(case.build, manager=auto(budget))
        take_step(model, optimizer, case, 7)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for name, value in model.state_dict(only_rank_0=False).items():
            assert torch.equal(value, weights[name]), (budget, name)
        for index, entry in optimizer.state_dict()["state"].items():
            assert_bit_equal(entry, state["state"][index], what=f"{budget}, state {index}")
        take_step(model, optimizer, case, 2)
        assert_bit_equal(exact(model), exact(reference[0]), what=str(budget))


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_clipping_is_that_of_the_run_without(world_size: int) -> None:
    case, found = CASES["gpt"], []
    for manager in (manager_of("cuda", chunk_numel=1000), auto(ROOMY), auto(tight("gpt"))):
        model, optimizer = build(case.build, sgd, manager=manager, clipping_norm=0.05)
        for step in range(3):
            take_step(model, optimizer, case, step)
        assert optimizer.grad_norm > 0.06  # it was clipped
        found.append(exact(model))
    for values in found[1:]:
        assert_bit_equal(values, found[0])


@pytest.mark.world_size(1, 2, 4, timeout_s=60)
def test_statistics_of_the_first_pass_are_those_of_a_plain_one(world_size: int) -> None:
    for name in ("gpt", "gpt-reentrant", "mlp", "lstm"):
        plain, expected = traced(name)
        manager = auto(ROOMY)
        model, optimizer = build(CASES[name].build, manager=manager, dtype=None)
        take_step(model, optimizer, CASES[name], 0)
        stats = manager.memstats
        assert stats is not None
        assert stats.num_steps == expected.num_steps, name
        mine = dict(model.named_parameters())
        for parameter_name, parameter in plain.named_parameters():
            uses = stats.param_used_step(mine[parameter_name])
            assert uses == expected.param_used_step(parameter), (name, parameter_name)
