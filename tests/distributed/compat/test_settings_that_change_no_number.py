"""Stages, buckets, overlap and offload are about time and memory: parameters keep every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.compat.colossalai import LowLevelZeroOptimizer
from tests.distributed.compat.kit import adam, backward, build, gradients, values
from tests.kit.models import OddMLP
from tests.kit.oracle import assert_bit_equal


def train(**arguments: Any) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Two passes and one update; return gradients and parameters."""
    model, optimizer = build(adam, **arguments)
    backward(model, optimizer, micro_batch=0)
    backward(model, optimizer, micro_batch=1)
    reduced = gradients(model, optimizer)
    optimizer.step()
    backward(model, optimizer, step=1)
    optimizer.step()
    return reduced, values(model)


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("clip_grad_norm", [0.0, 0.01])
def test_both_stages_give_equal_gradients_and_parameters(clip_grad_norm: float):
    one = train(partition_grad=False, clip_grad_norm=clip_grad_norm)
    two = train(partition_grad=True, clip_grad_norm=clip_grad_norm)
    assert_bit_equal(two[0], one[0])
    assert_bit_equal(two[1], one[1])


@pytest.mark.world_size(2, 3)
def test_the_bucket_size_changes_no_bit():
    expected = train(reduce_bucket_size=2**24)
    for numel in (1, 1000, 2**20):
        for partition_grad in (False, True):
            actual = train(reduce_bucket_size=numel, partition_grad=partition_grad)
            assert_bit_equal(actual[0], expected[0], what=str(numel))
            assert_bit_equal(actual[1], expected[1], what=str(numel))


@pytest.mark.world_size(2)
def test_a_bucket_is_a_number_of_elements_whatever_the_dtype():
    """A limit of elements that is compared with bytes makes half or quarter buckets."""
    for dtype in (torch.float32, torch.float16):
        parameters = [torch.nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(8)]
        zero = LowLevelZeroOptimizer(torch.optim.SGD(parameters, lr=1.0), reduce_bucket_size=256)
        zero.backward(torch.stack([p.float().sum() for p in parameters]).sum() * 2**-16)
        sizes = {chunk.layout.numel for e in zero._binding.engines() for chunk in e.chunks}
        assert sizes == {256}, (dtype, sizes)


@pytest.mark.world_size(2)
def test_overlap_and_host_memory_change_no_bit():
    """Without masters, too, offload is honoured: on a CPU all state lies in host memory already."""
    expected = train()
    assert_bit_equal(train(overlap_communication=True)[1], expected[1])
    assert_bit_equal(train(cpu_offload=True)[1], expected[1])
    bare = train(forced_dtype=torch.bfloat16, master_weights=False)
    held = train(forced_dtype=torch.bfloat16, master_weights=False, cpu_offload=True)
    assert_bit_equal(held[1], bare[1])
    model, zero = build(adam, forced_dtype=torch.bfloat16, master_weights=False, cpu_offload=True)
    backward(model, zero)
    zero.step()
    state = [v for entry in zero.optim.state.values() for v in entry.values()]
    assert {v.device.type for v in state if isinstance(v, Tensor)} == {"cpu"}
    assert {v.dtype for v in state if isinstance(v, Tensor) and v.ndim} == {torch.bfloat16}


@pytest.mark.world_size(4)
def test_sums_in_float32_round_float16_gradients_once(world_size: int):
    """Against float64 the error stays within one unit in the last place of float16."""
    for partition_grad in (False, True):
        torch.manual_seed(0)
        everyone = torch.randn(world_size, 1001).half()
        parameter = torch.nn.Parameter(torch.zeros(1001, dtype=torch.float16))
        zero = LowLevelZeroOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            initial_scale=1.0,
            communication_dtype=torch.float32,
            partition_grad=partition_grad,
        )
        rank = torch.distributed.get_rank()
        zero.backward((parameter * everyone[rank]).float().sum())
        actual = zero.get_param_grad(parameter)
        assert actual is not None
        expected = everyone.double().mean(0)
        unit = torch.finfo(torch.float16).eps * expected.abs().clamp_min(2**-14)
        assert (actual.double() - expected).abs().le(unit).all()
        zero.step()
        master = zero.state_dict()["shardwise"]["masters"][0]
        torch.testing.assert_close(master.double(), -expected, rtol=1e-6, atol=1e-7)


@pytest.mark.world_size(2)
def test_masters_of_a_forced_dtype_are_the_rounded_values():
    """Parameters in the optimizer are cast, others are not, and masters equal what forward uses."""
    torch.manual_seed(0)
    model = OddMLP()
    model.register_buffer("buffer", torch.ones(3))
    chosen = [*model.first.parameters(), *model.last.parameters()]
    zero = LowLevelZeroOptimizer(torch.optim.Adam(chosen), forced_dtype=torch.bfloat16)
    assert {p.dtype for p in chosen} == {torch.bfloat16}
    assert {p.dtype for p in model.unused.parameters()} == {torch.float32}
    assert model.get_buffer("buffer").dtype is torch.float32
    masters = zero.state_dict()["shardwise"]["masters"]
    for index, parameter in enumerate(chosen):
        assert masters[index].dtype is torch.float32
        assert torch.equal(masters[index], parameter.float())
