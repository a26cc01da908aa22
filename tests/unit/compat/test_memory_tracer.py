"""A recorded pass: what uses which parameter when; and nothing of it stays in the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.compat.colossalai import MemStats, OrderedParamGenerator, RuntimeMemTracer
from shardwise.errors import ShardwiseError
from tests.kit.models import CASES
from tests.kit.oracle import assert_bit_equal, seed


def trace(name: str) -> tuple[nn.Module, MemStats]:
    """Record one pass of a case."""
    torch.manual_seed(0)
    model = CASES[name].build()
    tracer = RuntimeMemTracer(model)
    seed(step=0, rank=0, micro_batch=0)
    tracer.backward(CASES[name].loss(tracer))  # type: ignore[arg-type]
    return model, tracer.memstats()


class Repeated(nn.Module):
    """Two layers that are used twice, before and after one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle, self.never = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self.second(self.first(x)))
            if _ == 0:
                x = self.middle(x)
        return x


def test_a_layer_used_twice_has_four_steps() -> None:
    """Two in forward and two in backward; one that is not used has none."""
    model = Repeated()
    tracer = RuntimeMemTracer(model)
    tracer.backward(tracer(torch.ones(1, 4)).sum())
    stats = tracer.memstats()
    counts = {n: len(stats.param_used_step(p) or []) for n, p in model.named_parameters()}
    expected = {"first": 4, "second": 4, "middle": 2, "never": 0}
    assert counts == {
        f"{layer}.{kind}": count for layer, count in expected.items() for kind in ("weight", "bias")
    }
    assert stats.num_steps == 10
    assert stats.param_used_step(model.first.weight) == [0, 3, 6, 9]
    assert stats.param_used_step(model.never.weight) is None
    assert stats.param_order() == [
        parameter
        for layer in (model.first, model.second, model.middle)
        for parameter in (layer.weight, layer.bias)
    ]


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_used_parameter_is_visited(name: str) -> None:
    model, stats = trace(name)
    unused = {id(p) for n, p in model.named_parameters() if n.startswith("unused.")}
    visited = {id(p) for p in stats.param_order()}
    assert visited == {id(p) for p in model.parameters()} - unused
    assert len(stats.non_model_data_list("cuda")) == stats.num_steps > 0
    assert stats.max_non_model_data("cpu") == 0


@pytest.mark.parametrize("name", ["conv", "gpt-dropout", "gpt-reentrant"])
def test_a_traced_pass_leaves_the_module_as_it_was(name: str) -> None:
    """Neither rounded values, nor statistics of a norm, nor gradients, nor random numbers."""
    torch.manual_seed(0)
    model, case = CASES[name].build(), CASES[name]
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    before: dict[str, Any] = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    hooks = [len(part._forward_hooks) for part in model.modules()]
    tracer = RuntimeMemTracer(model, torch.half)
    seed(step=0, rank=0, micro_batch=0)
    inputs_drawn: list[torch.Tensor] = []

    def run(*args: Any) -> Any:
        inputs_drawn.append(torch.get_rng_state())
        return tracer(*args)

    tracer.backward(case.loss(run))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), inputs_drawn[0])
    assert_bit_equal(model.state_dict(), before)
    assert_bit_equal({n: p.grad for n, p in model.named_parameters()}, gradients)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert [len(part._forward_hooks) for part in model.modules()] == hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_gradients_are_freed_as_they_arrive() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    held: list[int] = []
    for layer in model:
        layer.register_full_backward_hook(
            lambda *_: held.append(sum(p.grad is not None for p in model.parameters()))
        )
    tracer = RuntimeMemTracer(model)
    tracer.backward(tracer(torch.ones(1, 4, requires_grad=True)).sum())
    assert held == [0, 0, 0, 0]


def test_an_error_in_a_traced_pass_leaves_the_module_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(3, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tracer = RuntimeMemTracer(model)
    with pytest.raises(RuntimeError, match="shape"):
        tracer(torch.ones(2, 4))
    assert_bit_equal(model.state_dict(), before)


def test_statistics_of_nothing_say_so() -> None:
    stats = MemStats()
    with pytest.raises(ShardwiseError, match="RuntimeMemTracer"):
        stats.param_order()
    weight = nn.Parameter(torch.ones(2))
    stats.increase_preop_step([weight, weight], overall_bytes=30, model_bytes=8)
    stats.increase_preop_step([weight], overall_bytes=20, model_bytes=8)
    assert stats.param_used_step(weight) == [0, 1]
    assert stats.non_model_data_list("cuda") == [22, 12]
    assert (stats.max_non_model_data("cuda"), stats.max_overall_cuda) == (22, 30)
    stats.clear()
    assert (stats.num_steps, stats.max_overall_cuda, stats.param_used_step(weight)) == (0, 0, None)


def test_parameters_are_generated_in_order_of_their_first_visit() -> None:
    order = OrderedParamGenerator()
    assert order.is_empty()
    weights = [nn.Parameter(torch.ones(number)) for number in range(3)]
    for number in (2, 0, 2, 1, 0):
        order.append(weights[number])
    assert [w.numel() for w in order.generate()] == [2, 0, 1]
    order.clear()
    assert order.is_empty()
