"""Scripts call by position and by name: order, names and defaults of arguments are the contract."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch
from torch import nn

from shardwise.compat.colossalai import (
    ColoDDP,
    LowLevelZeroOptimizer,
    Reducer,
    ZeroDDP,
    data_parallel,
    get_static_torch_model,
    low_level_zero,
    reducer,
    static_model,
    zero_ddp,
)
from shardwise.errors import ConfigurationError

ZERO = {
    "initial_scale": 2**16,
    "min_scale": 1,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "hysteresis": 2,
    "max_scale": 2**24,
    "clip_grad_norm": 0.0,
    "verbose": False,
    "reduce_bucket_size": 1024 * 1024,
    "communication_dtype": None,
    "overlap_communication": False,
    "partition_grad": False,
    "cpu_offload": False,
    "dp_process_group": None,
    "sub_dp_size": 1,
    "forced_dtype": None,
    "master_weights": True,
}
DDP = {"process_group": None, "bucket_cap_mb": 25, "rebuild_bucket": True}
ZERO_DDP = {
    "gemini_manager": None,
    "pin_memory": False,
    "force_outputs_fp32": False,
    "strict_ddp_mode": False,
}
ZERO_DDP_BY_NAME = {
    "process_group": None,
    "mixed_precision": torch.float16,
    "loss_scale": None,
    "units": None,
    "chunk_bytes": None,
    "reshard_after_forward": True,
    "offload": None,
}


def defaults(function: object) -> dict[str, object]:
    """Positional arguments with a default, in order."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {
        p.name: p.default
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty
    }


def test_constructors_take_what_scripts_pass():
    assert list(inspect.signature(LowLevelZeroOptimizer).parameters) == ["optimizer", *ZERO]
    assert defaults(LowLevelZeroOptimizer) == ZERO
    assert list(inspect.signature(ColoDDP).parameters) == ["module", *DDP]
    assert defaults(ColoDDP) == DDP
    assert list(inspect.signature(Reducer).parameters) == ["bucket_size_mb"]
    arguments = inspect.signature(ZeroDDP).parameters
    assert list(arguments) == ["module", *ZERO_DDP, *ZERO_DDP_BY_NAME]
    assert defaults(ZeroDDP) == ZERO_DDP
    assert {n: arguments[n].default for n in ZERO_DDP_BY_NAME} == ZERO_DDP_BY_NAME


def test_methods_take_what_scripts_pass():
    expected = {
        "backward": ["loss", "retain_graph"],
        "backward_by_grad": ["tensor", "grad"],
        "step": ["closure"],
        "zero_grad": ["set_to_none"],
        "state_dict_shard": ["max_shard_size"],
        "load_state_dict": ["state_dict"],
        "update_master_params": ["model"],
        "get_param_grad": ["param"],
        "clip_grad_by_norm": ["max_norm", "norm_type", "error_if_nonfinite"],
        "clip_grad_by_value": ["clip_value"],
    }
    for name, arguments in expected.items():
        method = getattr(LowLevelZeroOptimizer, name)
        assert list(inspect.signature(method).parameters) == ["self", *arguments], name
    sizes = inspect.signature(LowLevelZeroOptimizer.state_dict_shard).parameters
    assert sizes["max_shard_size"].default == 1024
    zeroed = inspect.signature(ColoDDP.zero_grad).parameters["set_to_none"].default
    assert zeroed is False
    calls = inspect.signature(Reducer.all_reduce_async).parameters
    assert list(calls) == ["self", "tensor", "group", "callback_fn"]


def test_sharded_modules_take_what_scripts_pass():
    """Subclass tests, and the arguments of methods in the order of scripts."""
    assert issubclass(ZeroDDP, ColoDDP)
    expected = {
        "backward": ["loss"],
        "backward_by_grad": ["tensor", "grad"],
        "zero_grad": ["set_to_none"],
        "state_dict": ["destination", "prefix", "keep_vars", "only_rank_0", "strict"],
        "load_state_dict": ["state_dict", "strict", "assign"],
    }
    for name, arguments in expected.items():
        method = getattr(ZeroDDP, name)
        assert list(inspect.signature(method).parameters) == ["self", *arguments], name
    saving = {"destination": None, "prefix": "", "keep_vars": False}
    assert defaults(ZeroDDP.state_dict) == {**saving, "only_rank_0": True, "strict": True}
    names = list(inspect.signature(get_static_torch_model).parameters)
    assert names == ["zero_ddp_model", "device", "dtype", "only_rank_0"]
    assert defaults(get_static_torch_model) == {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "only_rank_0": True,
    }


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("gemini_manager", {"gemini_manager": "a manager"}),
        ("param_dtype", {"mixed_precision": torch.int8}),
        ("chunk_bytes", {"chunk_bytes": 0}),
        ("reshard_after_forward", {"reshard_after_forward": -1}),
        ("units", {"units": [nn.Conv2d]}),
        ("units", {"strict_ddp_mode": True, "units": [nn.Linear]}),
        ("reshard_after_forward", {"strict_ddp_mode": True, "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_sharded_modules_refuse_what_cannot_work_untouched(named: str, wrong: dict[str, object]):
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigurationError, match=named):
        ZeroDDP(model, **wrong)
    assert model.weight.dtype is torch.float32
    assert not hasattr(model.weight, "_shardwise")
    ZeroDDP(model, None, True)


def test_another_manager_is_refused_with_what_to_do_instead():
    with pytest.raises(ConfigurationError, match=r"expected a GeminiManager.*write GeminiManager"):
        ZeroDDP(nn.Linear(3, 2), object())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("clip_grad_norm", -1.0),
        ("reduce_bucket_size", 0),
        ("communication_dtype", torch.int32),
        ("forced_dtype", torch.int64),
        ("sub_dp_size", 2),
    ],
)
def test_arguments_that_cannot_work_are_refused_untouched(argument: str, value: object):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigurationError):
        LowLevelZeroOptimizer(optimizer, **{argument: value})
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert not hasattr(model.weight, "_shardwise")
    LowLevelZeroOptimizer(optimizer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_scale": 0.0},
        {"min_scale": 2.0**20},
        {"max_scale": 2.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"hysteresis": -1},
    ],
    ids=str,
)
def test_loss_scales_are_checked_where_they_are_used(wrong: dict[str, float]):
    """That is for float16 alone: no other dtype has a scale."""
    for dtype in (torch.float16, torch.bfloat16, None):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if dtype is torch.float16:
            with pytest.raises(ConfigurationError, match="LossScale"):
                LowLevelZeroOptimizer(optimizer, forced_dtype=dtype, **wrong)
            assert model.weight.dtype is torch.float32
        else:
            zero = LowLevelZeroOptimizer(optimizer, forced_dtype=dtype, **wrong)
            assert zero.loss_scale == 1.0


def test_parameters_on_an_accelerator_are_not_said_to_be_offloaded():
    """A setting that is dropped in silence would cost the memory it promised to save."""
    with pytest.raises(ConfigurationError, match="cpu_offload") as caught:
        refuse_offload()
    assert "cpu_offload=False" in str(caught.value)


def refuse_offload() -> None:
    """Ask for offload of parameters that lie elsewhere than in host memory."""
    from shardwise.compat.colossalai import settings

    weight = nn.Parameter(torch.empty(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    given = settings.Arguments(
        partition_grad=False,
        reduce_bucket_size=1,
        communication_dtype=None,
        cpu_offload=True,
        dp_process_group=None,
        sub_dp_size=1,
        forced_dtype=None,
        master_weights=False,
        loss_scale={},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "check_parameters", lambda _: torch.device("cuda"))
        settings.make_set_up(optimizer, given)


@pytest.mark.parametrize("module", [data_parallel, low_level_zero, reducer, static_model, zero_ddp])
def test_the_examples_run(module: object):
    names = {"torch": torch, "nn": nn}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0
