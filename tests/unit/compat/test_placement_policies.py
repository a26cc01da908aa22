"""Names and ratios of policies, and what is refused; no ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.compat.colossalai import (
    AutoPlacementPolicy,
    ChunkManager,
    ConstPlacementPolicy,
    CPUAdam,
    FusedAdam,
    GeminiAdamOptimizer,
    GeminiManager,
    HybridAdam,
    PlacementPolicyFactory,
    ZeroDDP,
    ZeroOptimizer,
)
from shardwise.compat.colossalai.gemini_manager import Sharding
from shardwise.errors import ConfigurationError
from shardwise.optimizer.kinds import STATE_PER_PARAMETER, known_as
from shardwise.options import AdaptiveOffload, Budget, StaticOffload

NUMEL = 100
EVERYTHING = StaticOffload(parameters=1.0, optimizer=1.0)


def sharding(policy: str, *, keep_gathered: bool = False, **settings: Any) -> Sharding:
    """Return what a manager asks the engine for, of 100 bfloat16 parameters on two ranks."""
    chunks = ChunkManager({2: {"chunk_size": 64, "keep_gathered": keep_gathered}})
    manager = GeminiManager(policy, chunks, **settings)
    weight = nn.Parameter(torch.ones(NUMEL))
    return manager.sharding([weight], dtype=torch.bfloat16, num_ranks=2)


@pytest.mark.parametrize(
    ("policy", "settings", "offload", "keep"),
    [
        ("cuda", {}, None, False),
        ("cpu", {}, EVERYTHING, True),
        ("const", {}, EVERYTHING, 512 * 2**20),
        ("static", {}, None, True),
        ("static", {"shard_param_frac": 0.0}, None, False),
        ("static", {"shard_param_frac": 0.75}, None, 50),
        ("static", {"offload_param_frac": 0.5}, StaticOffload(parameters=0.5), True),
        ("static", {"offload_optim_frac": 0.5}, StaticOffload(optimizer=0.5), True),
        ("auto", {}, AdaptiveOffload(Budget(accelerator="90%")), True),
        (
            "auto",
            {"budget": Budget(accelerator="1GiB", host="2GiB")},
            AdaptiveOffload(Budget(accelerator="1GiB", host="2GiB")),
            True,
        ),
    ],
    ids=str,
)
def test_a_policy_is_a_choice_of_the_engine(
    policy: str,
    settings: dict[str, Any],
    offload: Any,
    keep: bool | int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    expected = Sharding(stage=3, offload=offload, chunk_bytes=128, reshard_after_forward=keep)
    assert sharding(policy, **settings) == expected
    whole = sharding(policy, keep_gathered=True, **settings)
    if isinstance(offload, StaticOffload):
        offload = StaticOffload(optimizer=offload.optimizer) if offload.optimizer else None
    assert whole == Sharding(stage=2, offload=offload, chunk_bytes=128)


def test_ratios_are_set_for_the_managers_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert sharding("auto").offload == AdaptiveOffload(Budget())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(AutoPlacementPolicy, "_cap_ratio", 0.9)
    monkeypatch.setattr(ConstPlacementPolicy, "_boundary_bytes", None)
    chunks = ChunkManager({2: {"chunk_size": 64}})
    before = GeminiManager("const", chunks)
    AutoPlacementPolicy.set_steady_cuda_cap_ratio(0.5)
    AutoPlacementPolicy.set_warmup_non_model_data_ratio(0.7)
    ConstPlacementPolicy.set_const_memory_boundary(3)
    assert sharding("auto").offload == AdaptiveOffload(Budget(accelerator="50%"))
    assert sharding("const").reshard_after_forward == 3 * 2**20
    AutoPlacementPolicy.set_steady_cuda_cap_ratio(0.123)
    assert sharding("auto").offload == AdaptiveOffload(Budget(accelerator="12.3%"))
    AutoPlacementPolicy.set_steady_cuda_cap_ratio(0.5)
    made_earlier = before.sharding([], dtype=None, num_ranks=2)
    assert made_earlier.reshard_after_forward == 512 * 2**20
    for ratio in (0, 1.5, "half"):
        for setter in (
            AutoPlacementPolicy.set_steady_cuda_cap_ratio,
            AutoPlacementPolicy.set_warmup_non_model_data_ratio,
        ):
            with pytest.raises(ConfigurationError, match="ratio"):
                setter(ratio)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="set_const_memory_boundary"):
        ConstPlacementPolicy.set_const_memory_boundary(0)
    assert sharding("auto").offload == AdaptiveOffload(Budget(accelerator="50%"))


def test_names_and_default_devices() -> None:
    names = PlacementPolicyFactory.get_policy_names()
    assert set(names) == {"cuda", "cpu", "auto", "const", "static"}
    for name in ("cpu", "auto", "const"):
        assert GeminiManager.get_default_device(name) == torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    for name in ("cuda", "static"):
        assert GeminiManager.get_default_device(name) == accelerator or torch.device("cpu")
    with pytest.raises(ConfigurationError, match="policy"):
        PlacementPolicyFactory.get_default_device("gpu")


@pytest.mark.parametrize(
    ("policy", "settings", "named"),
    [
        ("gpu", {}, "policy"),
        ("cpu", {"offload_optim_frac": 0.5}, "fractions"),
        ("static", {"offload_optim_frac": 1.5}, "optimizer"),
        ("static", {"shard_param_frac": -0.5}, "shard"),
        ("cpu", {"budget": Budget()}, "budget"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(
    policy: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        GeminiManager(policy, ChunkManager({1: {"chunk_size": 64}}), **settings)


def test_a_manager_serves_one_module_and_the_ranks_that_it_knows() -> None:
    manager = GeminiManager("cuda", ChunkManager({2: {"chunk_size": 64}}))
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigurationError, match=r"1 ranks.*search_chunk_configuration"):
        ZeroDDP(model, manager)
    assert model.weight.dtype is torch.float32
    manager = GeminiManager("cuda", ChunkManager({1: {"chunk_size": 64}}))
    for setting in ({"chunk_bytes": 4}, {"reshard_after_forward": False}):
        with pytest.raises(ConfigurationError, match=next(iter(setting))):
            ZeroDDP(model, manager, **setting)  # type: ignore[arg-type]
    wrapped = ZeroDDP(model, manager, mixed_precision=None)
    with pytest.raises(ConfigurationError, match="no other module"):
        ZeroDDP(nn.Linear(3, 2), manager)
    assert (wrapped.gemini_manager, wrapped.chunk_manager) == (manager, manager.chunk_manager)
    assert ZeroDDP(nn.Linear(3, 2)).chunk_manager is None


def test_an_optimizer_needs_a_sharded_module_and_arguments_that_it_knows() -> None:
    plain = nn.Linear(3, 2)
    with pytest.raises(ConfigurationError, match="ZeroDDP"):
        ZeroOptimizer(HybridAdam(plain.parameters()), plain)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="ZeroDDP"):
        GeminiAdamOptimizer(plain)  # type: ignore[arg-type]
    model = ZeroDDP(nn.Linear(3, 2))
    inner = HybridAdam(model.parameters())
    for wrong in (
        {"gpu_margin_mem_ratio": 1.5},
        {"clipping_norm": -1.0},
        {"norm_type": 0.0},
        {"initial_scale": 0.5},
    ):
        with pytest.raises(ConfigurationError):
            ZeroOptimizer(inner, model, **wrong)  # type: ignore[arg-type]
        assert inner.param_groups[0]["params"] == list(model.parameters())
    with pytest.raises(TypeError, match="max_norm"):  # not swallowed: it would clip nothing
        ZeroOptimizer(inner, model, max_norm=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="clip"):
        GeminiAdamOptimizer(model, clip=1.0)
    ZeroOptimizer(inner, model)


@pytest.mark.parametrize("kind", [HybridAdam, CPUAdam, FusedAdam])
def test_options_of_adam_that_would_be_dropped_are_refused(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigurationError, match="bias_correction"):
        kind([weight], bias_correction=False)
    if kind is not FusedAdam:
        with pytest.raises(ConfigurationError, match=r"nvme_offload_fraction.*StaticOffload"):
            kind([weight], nvme_offload_fraction=0.5, nvme_offload_dir="/nowhere")
        assert kind([weight], adamw_mode=False).defaults["decoupled_weight_decay"] is False


class Changed(torch.optim.AdamW):
    """Has a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Named(HybridAdam):
    """Adds nothing."""


def test_subclasses_without_behaviour_of_their_own_run_chunk_by_chunk() -> None:
    """In whatever order torch puts its hooks around `step`: in the class of the first instance."""
    for _ in range(2):
        for kind in (Named, HybridAdam, CPUAdam, FusedAdam, torch.optim.Adam, torch.optim.AdamW):
            assert known_as(kind) in STATE_PER_PARAMETER, kind
        for other in (Changed, torch.optim.LBFGS, torch.optim.SparseAdam):
            assert known_as(other) is other, other
            assert other not in STATE_PER_PARAMETER
        for kind in (Named, CPUAdam, Changed):
            kind([nn.Parameter(torch.ones(2))])
