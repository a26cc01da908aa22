"""Names, order and defaults of arguments around the memory manager are the contract of scripts."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.compat import colossalai
from shardwise.compat.colossalai import (
    adam,
    chunk_manager,
    chunk_search,
    gemini_ddp,
    gemini_manager,
    memory_tracer,
    memstats,
    zero_optimizer,
)

ADAM = {
    "model_params": inspect.Parameter.empty,
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0,
    "adamw_mode": True,
    "nvme_offload_fraction": 0.0,
    "nvme_offload_dir": None,
}
REQUIRED = inspect.Parameter.empty
EXPECTED: dict[str, dict[str, Any]] = {
    "ChunkManager": {"chunk_configuration": REQUIRED, "init_device": None},
    "GeminiManager": {"placement_policy": REQUIRED, "chunk_manager": REQUIRED, "memstats": None},
    "GeminiDDP": {
        "module": REQUIRED,
        "device": None,
        "placement_policy": "cpu",
        "pin_memory": False,
        "force_outputs_fp32": False,
        "strict_ddp_mode": False,
        "search_range_mb": 32,
        "hidden_dim": None,
        "min_chunk_size_mb": None,
        "memstats": None,
    },
    "ZeroOptimizer": {
        "optim": REQUIRED,
        "module": REQUIRED,
        "gpu_margin_mem_ratio": 0.0,
        "initial_scale": 2**16,  # theirs is 2**32, which costs the first steps
        "min_scale": 1,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
        "max_scale": 2**32,
        "clipping_norm": 0.0,
        "norm_type": 2.0,
    },
    "GeminiAdamOptimizer": {"model": REQUIRED},
    "HybridAdam": ADAM,
    "CPUAdam": ADAM,
    "FusedAdam": {
        "params": REQUIRED,
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "adam_w_mode": True,
        "weight_decay": 0.0,
        "amsgrad": False,
        "set_grad_none": True,
    },
    "RuntimeMemTracer": {"module": REQUIRED, "dtype": torch.half},
    "search_chunk_configuration": {
        "model": REQUIRED,
        "search_range_mb": REQUIRED,
        "search_interval_byte": REQUIRED,
        "min_chunk_size_mb": 32,
        "filter_exlarge_params": True,
        "strict_ddp_flag": False,
        "memstats": None,
    },
    "init_chunk_manager": {"model": REQUIRED, "init_device": None, "hidden_dim": None},
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_calls_take_what_scripts_pass(name: str):
    parameters = inspect.signature(getattr(colossalai, name)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert positional == EXPECTED[name]
    assert list(positional) == list(EXPECTED[name])


def test_methods_take_what_scripts_pass():
    expected = {
        "backward": ["loss"],
        "backward_by_grad": ["tensor", "grad"],
        "step": ["closure"],
        "zero_grad": ["set_to_none"],
        "clip_grad_norm": ["model", "max_norm", "norm_type"],
        "load_state_dict": ["state_dict"],
    }
    for name, arguments in expected.items():
        method = getattr(colossalai.ZeroOptimizer, name)
        assert list(inspect.signature(method).parameters) == ["self", *arguments], name


def test_every_name_that_is_offered_is_there():
    for name in colossalai.__all__:
        assert inspect.getdoc(getattr(colossalai, name)), name


@pytest.mark.parametrize(
    "module",
    [
        adam,
        chunk_manager,
        chunk_search,
        gemini_ddp,
        gemini_manager,
        memory_tracer,
        memstats,
        zero_optimizer,
    ],
)
def test_the_examples_run(module: object):
    names = {"torch": torch, "nn": nn}
    result = doctest.testmod(module, extraglobs=names)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0
