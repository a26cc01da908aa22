"""Placement policies change where bytes lie, and no number."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat.colossalai import CPUAdam, FusedAdam, GeminiAdamOptimizer, GeminiDDP, ZeroDDP
from tests.distributed.compat.gemini_kit import (
    CHUNK_NUMEL,
    POLICIES,
    adam,
    build,
    check,
    host_bytes,
    manager_of,
    numel_of,
    rounded_model,
    take_step,
)
from tests.distributed.compat.zero_ddp_kit import exact, sgd
from tests.kit.models import CASES, TinyGPTConfig, gpt_case
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed


@pytest.mark.world_size(1, 2, 3, 4, timeout_s=120)
@pytest.mark.parametrize("keep_gathered", [False, True], ids=["scattered", "kept"])
def test_every_policy_is_bit_equal(world_size: int, keep_gathered: bool) -> None:
    names = ("gpt", "gpt-reentrant", "gpt-non-reentrant")
    for policy in POLICIES:
        for name in names if world_size in (1, 2) else names[:2]:
            manager = manager_of(keep_gathered=keep_gathered, **policy)
            check(CASES[name], manager, what=f"{policy}, {keep_gathered}, {name}")


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_every_dtype_and_model_is_bit_equal(world_size: int) -> None:
    for policy in POLICIES[:3]:
        for name in ("mlp", "conv", "lstm", "odd-shapes"):
            check(CASES[name], manager_of(**policy), what=f"{policy}, {name}")
        for dtype in (None, torch.float16):
            manager = manager_of(**policy, chunk_numel=999)
            check(CASES["gpt"], manager, what=f"{policy}, {dtype}", dtype=dtype)


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_bytes_lie_where_the_policy_says(world_size: int) -> None:
    """14 bytes a parameter and rank: 2 of the working slice, 12 of masters and moments."""
    for policy in POLICIES:
        model, optimizer = build(CASES["gpt"].build, manager=manager_of(**policy))
        for step in range(2):
            take_step(model, optimizer, CASES["gpt"], step)
        numel = numel_of(model) / world_size
        name = policy["policy"]
        is_all = name in ("cpu", "const")
        optimizer_share = 1 if is_all else policy.get("offload_optim_frac", 0)
        parameter_share = 1 if is_all else policy.get("offload_param_frac", 0)
        expected = numel * (12 * optimizer_share + 2 * parameter_share)
        slack = 14 * CHUNK_NUMEL / world_size if 0 < optimizer_share < 1 else 0.05 * expected
        assert abs(host_bytes(model) - expected) <= slack, policy
        total = model.chunk_manager.total_mem
        assert 14 * numel <= total["cpu"] + total["cuda"] <= 14.8 * numel + 2000, (policy, total)


@pytest.mark.world_size(2, timeout_s=60)
def test_kept_chunks_are_whole_and_their_state_is_not() -> None:
    model, optimizer = build(CASES["gpt"].build, manager=manager_of("cpu", keep_gathered=True))
    take_step(model, optimizer, CASES["gpt"], 0)
    numel = numel_of(model)
    total = model.chunk_manager.total_mem
    assert 2 * numel <= total["cuda"] <= 2.1 * numel + 2000
    assert 6 * numel <= total["cpu"] <= 6.3 * numel


@pytest.mark.world_size(2, 3, timeout_s=60)
def test_gathered_bytes_stay_below_what_the_policy_allows(world_size: int) -> None:
    """ "cuda" gathers in forward alone; "cpu" holds no more than is in use or coming next."""
    for policy, num_gathers, has_all in (
        ({"policy": "cuda"}, 1, True),
        ({"policy": "static", "shard_param_frac": 0.0}, 1, True),
        ({"policy": "const"}, 1, True),  # all is less than 512 MiB
        ({"policy": "cpu"}, 2, False),
    ):
        case = gpt_case("deep", TinyGPTConfig(num_blocks=5))
        model, optimizer = build(case.build, manager=manager_of(**policy, chunk_numel=1000))
        for step in range(2):
            take_step(model, optimizer, case, step)
        engine = model.module.__dict__["_shardwise"]
        gatherer, num_chunks = engine.residence.gatherer, len(engine.chunks)
        gatherer.num_gathers = 0
        gatherer.peak_bytes = 0
        take_step(model, optimizer, case, 2)
        whole_bytes = sum(chunk.whole_bytes for chunk in engine.chunks)
        assert (gatherer.peak_bytes == whole_bytes) is has_all, policy
        assert num_chunks * (num_gathers - 1) < gatherer.num_gathers <= num_chunks * num_gathers, (
            policy,
            gatherer.num_gathers,
            num_chunks,
        )


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
def test_evaluation_is_possible_at_any_time(world_size: int) -> None:
    """Before the first step, between steps, and between backward and step."""
    case, dtype = CASES["gpt"], torch.bfloat16
    records = run_oracle(
        case.build, adam, case.loss, OracleOptions(world_size=world_size, param_dtype=dtype)
    )
    torch.manual_seed(0)
    values = [dict(case.build().named_parameters()), *(record.parameters for record in records)]
    for policy in POLICIES:
        for keep_gathered in (False, True):
            calls: list[int] = []

            def evaluate(model: ZeroDDP, calls: list[int] = calls, policy: object = policy) -> None:
                plain = rounded_model(case, values[len(calls) // 2], dtype)
                calls.append(1)
                for one in (model, plain):
                    one.eval()
                seed(step=77, rank=0, micro_batch=0)
                with torch.no_grad():
                    found = case.loss(model)
                seed(step=77, rank=0, micro_batch=0)
                with torch.no_grad():
                    expected = case.loss(plain)
                assert torch.equal(found, expected), (policy, len(calls))
                model.train()

            manager = manager_of(keep_gathered=keep_gathered, **policy)
            check(case, manager, what=f"{policy}, {keep_gathered}", between=evaluate)
            assert len(calls) == 6


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
def test_state_travels_between_policies(world_size: int) -> None:
    """Model and optimizer state of any policy continue under any other, to the bit."""
    case = CASES["gpt"]
    reference = build(case.build, manager=manager_of("cuda"))
    for step in range(2):
        take_step(*reference, case, step)
    weights = reference[0].state_dict(only_rank_0=False)
    state = reference[1].state_dict()
    take_step(*reference, case, 2)
    expected = exact(reference[0])
    for policy in POLICIES:
        for keep_gathered in (False, True):
            manager = manager_of(keep_gathered=keep_gathered, **policy)
            model, optimizer = build(case.build, manager=manager)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            for name, value in model.state_dict(only_rank_0=False).items():
                assert torch.equal(value, weights[name]), (policy, name)
            for index, entry in optimizer.state_dict()["state"].items():
                assert_bit_equal(entry, state["state"][index], what=f"{policy}, state {index}")
            take_step(model, optimizer, case, 2)
            assert_bit_equal(exact(model), expected, what=f"{policy}, {keep_gathered}")


@pytest.mark.world_size(2, timeout_s=60)
def test_state_of_plain_torch_is_taken_and_given() -> None:
    case = CASES["gpt-untied"]
    model, optimizer = build(case.build, manager=manager_of("cpu"), dtype=None)
    take_step(model, optimizer, case, 0)
    torch.manual_seed(0)
    plain = case.build()
    theirs = adam(plain)
    plain.load_state_dict(model.state_dict(only_rank_0=False))
    theirs.load_state_dict(optimizer.state_dict())
    again, optimizer = build(case.build, manager=manager_of("cuda"), dtype=None)
    again.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    take_step(model, optimizer_of(model, theirs), case, 1)
    take_step(again, optimizer, case, 1)
    assert_bit_equal(exact(again), exact(model))


def optimizer_of(model: ZeroDDP, theirs: torch.optim.Optimizer) -> GeminiAdamOptimizer:
    """Make another optimizer for a model, with the state of a plain one."""
    optimizer = GeminiAdamOptimizer(model, lr=1e-2, weight_decay=0.1)
    optimizer.load_state_dict(theirs.state_dict())
    return optimizer


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
def test_the_one_call_faces_are_the_same(world_size: int) -> None:
    """`GeminiDDP` searches by itself; `GeminiAdamOptimizer` makes the optimizer."""
    case = CASES["gpt"]
    records = run_oracle(
        case.build, adam, case.loss, OracleOptions(world_size=world_size, param_dtype=torch.float16)
    )
    for policy in ("cuda", "cpu", "const"):
        for strict in (False, True):
            torch.manual_seed(0)
            model = GeminiDDP(
                case.build(),
                torch.device("cpu"),
                policy,
                strict_ddp_mode=strict,
                hidden_dim=28,
                search_range_mb=1,
                min_chunk_size_mb=0.004,
            )
            optimizer = GeminiAdamOptimizer(model, lr=1e-2, weight_decay=0.1, initial_scale=1.0)
            for step, record in enumerate(records):
                loss = take_step(model, optimizer, case, step)
                assert loss == record.losses[dist.get_rank()][0]
                assert_bit_equal(exact(model), record.parameters, what=f"{policy}, {strict}")


@pytest.mark.world_size(1, 3, timeout_s=60)
def test_clipping_is_that_of_torch(world_size: int) -> None:
    """Norms are summed in another order, so to a tolerance; over policies to the bit.

    By plain SGD: Adam divides gradients that are all rounding by their own size.
    """
    for norm_type in (2.0, float("inf")):
        case, found = CASES["gpt"], []
        options = OracleOptions(
            world_size=world_size, param_dtype=None, clip_grad_norm=0.05, norm_type=norm_type
        )
        *_, last = run_oracle(case.build, sgd, case.loss, options)
        for policy in POLICIES:
            for keep_gathered in (False, True) if policy in POLICIES[:2] else (False,):
                manager = manager_of(keep_gathered=keep_gathered, **policy)
                model, optimizer = build(
                    case.build,
                    sgd,
                    manager=manager,
                    dtype=None,
                    clipping_norm=0.05,
                    norm_type=norm_type,
                )
                for step in range(3):
                    take_step(model, optimizer, case, step)
                assert abs(optimizer.grad_norm / last.grad_norm - 1) < 1e-4
                assert last.grad_norm > 0.06  # it was clipped
                found.append(exact(model))
        for values in found:
            assert_bit_equal(values, found[0], what="over policies")
        for name, value in last.parameters.items():
            torch.testing.assert_close(found[0][name], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.world_size(2, timeout_s=60)
def test_passes_add_up_until_a_step_uses_them_up() -> None:
    case = CASES["gpt"]
    options = OracleOptions(world_size=2, num_micro_batches=2, param_dtype=torch.bfloat16)
    records = run_oracle(case.build, adam, case.loss, options)
    for policy in POLICIES:
        model, optimizer = build(case.build, manager=manager_of(**policy))
        for step, record in enumerate(records):
            for micro_batch in range(2):
                seed(step=step, rank=dist.get_rank(), micro_batch=micro_batch)
                optimizer.backward(case.loss(model))
            optimizer.step()
            assert_bit_equal(exact(model), record.parameters, what=f"{policy}, {step}")


@pytest.mark.world_size(2, timeout_s=60)
def test_a_gradient_from_upstream_is_the_same_pass() -> None:
    for policy in POLICIES:
        results = []
        for from_upstream in (False, True):
            model, optimizer = build(lambda: nn.Linear(7, 3), manager=manager_of(**policy))
            output = model(torch.full((2, 7), 1.0 + dist.get_rank()))
            if from_upstream:
                optimizer.backward_by_grad(output, torch.full_like(output, 0.5))
            else:
                optimizer.backward((output * 0.5).sum())
            optimizer.step()
            results.append(exact(model))
        assert_bit_equal(*results, what=str(policy))


@pytest.mark.world_size(2, timeout_s=60)
def test_every_adam_of_that_library_is_torchs() -> None:
    case = CASES["gpt"]
    for decoupled in (True, False):

        def plain(model: nn.Module, decoupled: bool = decoupled) -> torch.optim.Optimizer:
            return torch.optim.Adam(
                model.parameters(),
                lr=1e-2,
                weight_decay=0.1,
                decoupled_weight_decay=decoupled,
                fused=True,
            )

        options = OracleOptions(world_size=2, param_dtype=torch.bfloat16)
        *_, last = run_oracle(case.build, plain, case.loss, options)
        for kind, name in ((CPUAdam, "adamw_mode"), (FusedAdam, "adam_w_mode")):
            for policy in ("cuda", "cpu"):
                model, optimizer = build(
                    case.build,
                    lambda m, k=kind, n=name, d=decoupled: k(
                        m.parameters(), lr=1e-2, weight_decay=0.1, **{n: d}
                    ),
                    manager=manager_of(policy),
                )
                for step in range(3):
                    take_step(model, optimizer, case, step)
                assert_bit_equal(exact(model), last.parameters, what=f"{kind}, {policy}")


@pytest.mark.world_size(2, timeout_s=60)
def test_the_margin_changes_no_number() -> None:
    for policy in POLICIES[:3]:
        for ratio in (0.3, 1.0):
            check(
                CASES["gpt"],
                manager_of(**policy),
                what=f"{policy}, {ratio}",
                gpu_margin_mem_ratio=ratio,
            )
