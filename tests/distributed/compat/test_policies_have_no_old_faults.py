"""What went wrong under the policies of that library, each as the property that it broke."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.compat.colossalai import (
    ChunkManager,
    ColoDDP,
    GeminiAdamOptimizer,
    GeminiManager,
    HybridAdam,
    ZeroDDP,
    ZeroOptimizer,
    get_static_torch_model,
    search_chunk_configuration,
)
from shardwise.options import StaticOffload
from shardwise.report import held_bytes
from shardwise.runtime import offload as runtime_offload
from tests.distributed.compat.gemini_kit import (
    POLICIES,
    adam,
    build,
    manager_of,
    take_step,
)
from tests.distributed.compat.test_zero_ddp_recovers_from_errors import Model as Failing
from tests.distributed.compat.test_zero_ddp_recovers_from_errors import loss_of
from tests.distributed.compat.test_zero_ddp_takes_tensor_parallel_modules import (
    build as build_split,
)
from tests.distributed.compat.test_zero_ddp_takes_tensor_parallel_modules import whole
from tests.distributed.compat.zero_ddp_kit import exact
from tests.kit.models import CASES
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_a_scale_that_is_not_given_costs_few_steps(world_size: int) -> None:
    """A scale of 2**32 overflows float16 for the first sixteen steps, whatever the model."""
    case = CASES["gpt"]
    for policy in POLICIES[:3]:
        torch.manual_seed(0)
        model = ZeroDDP(case.build(), manager_of(**policy))
        optimizer = ZeroOptimizer(HybridAdam(model.parameters(), lr=1e-3), model)
        assert optimizer.loss_scale == 2.0**16
        num_skipped = 0
        for step in range(6):
            before = exact(model)
            take_step(model, optimizer, case, step)
            changed = exact(model)
            is_same = all(torch.equal(changed[name], before[name]) for name in before)
            assert is_same is optimizer.last_step_skipped
            num_skipped += is_same
        assert num_skipped <= 3, policy  # gradients above 1 are too large for it


@pytest.mark.world_size(2, 3, timeout_s=60)
def test_an_overflow_on_one_rank_skips_the_step_and_keeps_every_bit(world_size: int) -> None:
    for policy in POLICIES:
        model, optimizer = build(
            lambda: nn.Linear(9, 5),
            manager=manager_of(**policy, chunk_numel=16),
            dtype=torch.float16,
            initial_scale=2.0**10,
            hysteresis=1,
        )
        before = exact(model)
        factor = float("inf") if dist.get_rank() == 1 else 1.0
        optimizer.backward(model(torch.ones(1, 9)).float().sum() * factor)
        optimizer.step()
        assert optimizer.last_step_skipped
        assert optimizer.loss_scale == 2.0**9
        assert_bit_equal(exact(model), before, what=str(policy))
        optimizer.backward(model(torch.ones(1, 9)).float().sum())
        optimizer.step()
        assert not torch.equal(exact(model)["weight"], before["weight"])


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_scales_divide_gradients_that_had_them(world_size: int) -> None:
    """On every step that lets the scale grow, too."""
    for policy in POLICIES:
        model, optimizer = build(
            lambda: nn.Linear(4, 1, bias=False),
            lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
            manager=manager_of(**policy),
            dtype=torch.float16,
            initial_scale=8.0,
            growth_interval=1,
            clipping_norm=1.0,
        )
        model.load_state_dict({"weight": torch.ones(1, 4)})
        for number in range(1, 4):
            optimizer.backward(model(torch.full((1, 4), 0.25)).float().sum())
            optimizer.step()
            assert optimizer.loss_scale == 8.0 * 2**number
            expected = torch.full((1, 4), 1 - 0.25 * number)
            assert torch.equal(exact(model)["weight"], expected), (policy, number)


class Choice(nn.Module):
    """A frozen layer, a used one and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused = (nn.Linear(6, 6) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(torch.tanh(self.frozen(x)))


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
def test_chunks_with_unused_and_frozen_parameters_are_reduced(world_size: int) -> None:
    """All in one chunk: one tensor that never gets a gradient must not hold back the others."""
    for policy in POLICIES:
        for keep_gathered in (False, True):
            manager = manager_of(keep_gathered=keep_gathered, **policy)
            model, optimizer = build(Choice, manager=manager)
            before = exact(model)
            for _ in range(2):
                optimizer.backward(model(torch.ones(2, 6)).float().square().mean())
                optimizer.step()
            after = exact(model)
            changed = {name for name in before if not torch.equal(before[name], after[name])}
            assert changed == {"used.weight", "used.bias"}, (policy, keep_gathered)


@pytest.mark.world_size(1, 2, timeout_s=60)
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_step_after_a_broken_one_is_that_of_one_process(fails: str) -> None:
    options = OracleOptions(
        world_size=dist.get_world_size(), num_steps=2, param_dtype=torch.bfloat16
    )
    records = run_oracle(Failing, adam, loss_of, options)
    for policy in POLICIES:
        model, optimizer = build(Failing, manager=manager_of(**policy, chunk_numel=32))
        for step, record in enumerate(records):
            optimizer.backward(loss_of(model))  # a micro-batch before is forgotten with it
            model.module.fails = fails
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizer.backward(loss_of(model))
            model.module.fails = None
            optimizer.zero_grad()
            seed(step=step, rank=dist.get_rank(), micro_batch=0)
            optimizer.backward(loss_of(model))
            optimizer.step()
            assert_bit_equal(exact(model), record.parameters, what=f"{policy}, {step}")


Named = namedtuple("Named", ["hidden", "rest"])


class Containers(nn.Module):
    """Returns what only its own class can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return Named(self.layer(x), {"number": 3, "values": [self.layer(x)]})


@pytest.mark.world_size(2, timeout_s=60)
def test_outputs_keep_their_classes_and_become_float32_where_asked() -> None:
    for policy in POLICIES:
        model, _ = build(Containers, manager=manager_of(**policy), ddp={"force_outputs_fp32": True})
        output = model(torch.ones(1, 3))
        assert type(output) is Named
        assert output.hidden.dtype is output.rest["values"][0].dtype is torch.float32
        assert output.rest["number"] == 3


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
def test_copies_and_state_are_exact_wherever_values_rest(world_size: int) -> None:
    for policy in POLICIES:
        for keep_gathered in (False, True) if policy in POLICIES[:2] else (False,):
            manager = manager_of(keep_gathered=keep_gathered, **policy)
            model, optimizer = build(CASES["gpt"].build, manager=manager)
            take_step(model, optimizer, CASES["gpt"], 0)
            values = exact(model)
            plain = get_static_torch_model(model, only_rank_0=False)
            assert_bit_equal(dict(plain.named_parameters()), values, what=str(policy))
            assert plain.output.weight is plain.embedding.weight
            for strict in (True, False):
                state = model.state_dict(strict=strict)
                assert bool(state) is (dist.get_rank() == 0)
                whole_state = model.state_dict(strict=strict, only_rank_0=False)
                model.load_state_dict(whole_state, strict=strict)
            assert_bit_equal(exact(model), values, what=str(policy))
            take_step(model, optimizer, CASES["gpt"], 9)


@pytest.mark.world_size(2, timeout_s=60)
def test_ignored_parameters_stay_with_their_rank() -> None:
    for policy in POLICIES:
        torch.manual_seed(dist.get_rank())
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ColoDDP.set_params_to_ignore(plain[0].parameters())
        plain[0].requires_grad_(False)
        mine = copy.deepcopy(plain[0].weight.detach()).bfloat16()
        model = ZeroDDP(plain, manager_of(**policy), mixed_precision=torch.bfloat16)
        optimizer = GeminiAdamOptimizer(model, lr=0.1)
        optimizer.backward(model(torch.ones(1, 4)).float().sum())
        optimizer.step()
        assert torch.equal(plain[0].weight, mine), policy


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
def test_modules_without_values_get_them_chunk_by_chunk(world_size: int) -> None:
    """A model need not fit into a rank before it is wrapped."""
    case = CASES["gpt-untied"]
    for policy in POLICIES:
        with torch.device("meta"):
            module = case.build()
        module.position = nn.Parameter(torch.zeros(module.position.shape))  # no initialiser
        configuration, _ = search_chunk_configuration(module, 0, 4, min_chunk_size_mb=0)
        settings = {name: value for name, value in policy.items() if name != "policy"}
        manager = GeminiManager(policy["policy"], ChunkManager(configuration), **settings)
        torch.manual_seed(0)
        model = ZeroDDP(module, manager, mixed_precision=torch.bfloat16)
        optimizer = GeminiAdamOptimizer(model, lr=1e-2)
        losses = [take_step(model, optimizer, case, 0) for _ in range(4)]
        assert losses[-1] < losses[0], policy


@pytest.mark.world_size(4, timeout_s=60)
def test_split_models_are_searched_and_trained_over_the_data_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_group()
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    plain = build_split()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    reference.step()
    for policy in POLICIES:
        module = build_split(mesh["tp"])
        configuration, _ = search_chunk_configuration(
            module, 0, 4, min_chunk_size_mb=0, process_group=group
        )
        assert list(configuration) == [2]
        assert configuration[2]["chunk_size"] < 8 * 26  # of parts, not of whole weights
        settings = {name: value for name, value in policy.items() if name != "policy"}
        manager = GeminiManager(policy["policy"], ChunkManager(configuration), **settings)
        model = ZeroDDP(module, manager, process_group=group, mixed_precision=None)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ZeroOptimizer(inner, model, clipping_norm=0.1)
        optimizer.backward(model(x[mesh["dp"].get_local_rank()]).square().mean())
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        for name, value in whole(model.state_dict(only_rank_0=False)).items():
            torch.testing.assert_close(value, plain.state_dict()[name])


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_nothing_is_locked_where_nothing_leaves_the_accelerator(monkeypatch) -> None:
    """`pin_memory` once locked six bytes a parameter under every policy."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("host memory was opened")

    monkeypatch.setattr(runtime_offload, "open_tiers", refuse)
    for policy in ({"policy": "cuda"}, {"policy": "static"}):
        model, optimizer = build(
            CASES["gpt"].build, manager=manager_of(**policy), ddp={"pin_memory": True}
        )
        take_step(model, optimizer, CASES["gpt"], 0)
    with pytest.raises(AssertionError, match="was opened"):
        build(CASES["gpt"].build, manager=manager_of("cpu"))


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_disk_is_chosen_where_the_model_is_wrapped(tmp_path) -> None:
    """A fraction of what an optimizer sees may be a fraction of nothing; here it is of bytes."""
    case = CASES["gpt"]
    options = OracleOptions(world_size=dist.get_world_size(), param_dtype=torch.bfloat16)
    records = run_oracle(case.build, adam, case.loss, options)
    offload = StaticOffload(optimizer=0.5, to="disk", disk_path=tmp_path)
    model, optimizer = build(
        case.build, manager=manager_of("cuda", chunk_numel=1000), ddp={"offload": offload}
    )
    for step, record in enumerate(records):
        take_step(model, optimizer, case, step)
        assert_bit_equal(exact(model), record.parameters, what=f"step {step}")
    numel = sum(p.numel() for p in model.parameters()) / dist.get_world_size()
    held = held_bytes(model.module, optimizer._sharded)
    assert held.disk == pytest.approx(6 * numel, rel=0.25)
    engine = model.module.__dict__["_shardwise"]
    host = engine.offload.mover.tiers.host
    optimizer.backward(case.loss(model))
    gradients = host.allocated_bytes
    host.reset_peak()
    optimizer.step()
    largest = max(chunk.own.numel for chunk in engine.chunks)
    assert host.peak_bytes <= gradients + 3 * 12 * largest, "chunk by chunk"
