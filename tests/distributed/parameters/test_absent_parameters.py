"""A parameter of which every rank holds a slice describes itself, and refuses to be read."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))


READS = {
    "sum": lambda p: p.sum(),
    "cast": lambda p: p.double(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "tolist": lambda p: p.tolist(),
    "arithmetic": lambda p: 1 + p,
    "a list of tensors": lambda p: torch.cat([p.new_zeros(1), p.flatten()]),
    "a keyword": lambda p: torch.nn.functional.linear(torch.ones(1, 5), weight=p),
    "numpy": lambda p: p.numpy(),
    "norm": lambda p: torch.nn.utils.get_total_norm([p]),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "storage": lambda p: p.untyped_storage(),
    "write": lambda p: p.data.zero_(),
    "in place": lambda p: p.zero_(),
    "data =": lambda p: setattr(p, "data", torch.zeros(p.shape)),
}


@pytest.mark.world_size(2)
def test_reads_outside_of_forward_are_refused_and_name_the_way() -> None:
    model = sw.shard(build())
    for name, read in READS.items():
        with torch.no_grad(), pytest.raises(sw.ShardwiseError) as caught:
            read(model[0].weight)
        assert "0.weight" in str(caught.value), name
        assert "full_parameters" in str(caught.value), name


NAMES = {
    "parameter.data": lambda p: p.data,
    "parameter.half": lambda p: p.half(),
    "parameter.norm": lambda p: p.norm(),
    "parameter.T": lambda p: p.T,
    "parameter.zero_": lambda p: p.zero_(),
    "torch.isnan": torch.isnan,
    "torch._foreach_norm": lambda p: torch._foreach_norm([p]),
    "torch.linalg.norm": torch.linalg.norm,
    "torch.nn.functional.linear": lambda p: torch.nn.functional.linear(torch.ones(1, 5), p),
    "torch.nn.init.normal_": torch.nn.init.normal_,
    "copy.deepcopy or pickle": copy.deepcopy,
}


@pytest.mark.world_size(2)
def test_refusals_name_what_was_typed() -> None:
    model = sw.shard(build())
    for name, read in NAMES.items():
        with torch.no_grad(), pytest.raises(sw.ShardwiseError) as caught:
            read(model[0].weight)
        message = str(caught.value)
        assert message.startswith(f"{name} expected a parameter"), message
        assert ("writeback=True" in message) == name.endswith("_"), message


MOVES = {
    "to a device": lambda m: m.to("cpu"),
    "to a dtype": lambda m: m.to(torch.float32),
    "to both": lambda m: m.to(device="cpu", dtype=torch.float32, non_blocking=True),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_moves_to_where_a_module_is_already_change_nothing(has_gradients: bool) -> None:
    model = sw.shard(build())
    if has_gradients:
        model[0](torch.ones(1, 5)).sum().backward()
    before = list(model.parameters())
    for move in MOVES.values():
        assert move(model) is model
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    with sw.full_parameters(model):
        assert_bit_equal(dict(model.named_parameters()), dict(build().named_parameters()))
    if has_gradients:
        assert sw.full_gradient(model[0].bias).tolist() == [1.0] * 7


@pytest.mark.world_size(2)
def test_descriptions_are_true_at_every_moment() -> None:
    plain, model = build(), sw.shard(build())
    seen = []

    def describe(p: nn.Parameter) -> tuple[object, ...]:
        return (
            p.shape,
            p.numel(),
            p.dim(),
            p.ndim,
            p.dtype,
            p.device,
            p.layout,
            p.requires_grad,
            p.is_leaf,
            p.is_floating_point(),
            p.element_size(),
            p.size(0),
            len(p) if p.dim() else 0,
            p.grad,
            isinstance(p, nn.Parameter),
        )

    def look(*_: object) -> None:
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert describe(mine) == describe(other)
            seen.append(mine)

    look()
    model[0].register_forward_hook(look)
    model[0](torch.ones(2, 5)).sum().backward()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert "0.weight" in repr(model[0].weight)
    assert "7, 5" in repr(model[0].weight)
    assert len({id(p) for p in seen}) == len(list(model.parameters()))
    assert {model[0].weight: 1}[model[0].weight] == 1


@pytest.mark.world_size(2)
def test_inside_full_parameters_everything_is_plain() -> None:
    plain, model = build(), sw.shard(build())
    with sw.full_parameters(model):
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(mine) is nn.Parameter
            assert mine.stride() == other.stride()
        assert_bit_equal(dict(model.named_parameters()), dict(plain.named_parameters()))
        twin = copy.deepcopy(model)
        outcome = torch.func.functional_call(
            model[0], {"weight": torch.zeros(7, 5)}, (torch.ones(1, 5),)
        )
        assert torch.equal(outcome, plain[0].bias[None])
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    assert_bit_equal(dict(twin.named_parameters()), dict(plain.named_parameters()))
    with pytest.raises(sw.ShardwiseError, match="full_parameters"):
        model[0].weight.sum()


@pytest.mark.world_size(2, 3)
def test_whole_values_may_be_written_without_communication() -> None:
    model = sw.shard(build(), mixed_precision=sw.MixedPrecision(param_dtype=torch.bfloat16))
    values = {n: torch.randn(p.shape) for n, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    with sw.full_parameters(model):
        actual = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert_bit_equal(actual, {n: v.bfloat16() for n, v in values.items()})
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    masters = optimizer.state_dict()["shardwise"]["masters"]
    assert_bit_equal(dict(zip(values, masters.values(), strict=True)), values)  # not rounded
    with pytest.raises(RuntimeError):
        model[0].weight.copy_(values["0.weight"])
    with pytest.raises(RuntimeError), torch.no_grad():
        model[0].weight.copy_(torch.zeros(3))


@pytest.mark.world_size(2)
def test_edits_are_kept_by_writeback_and_dropped_without() -> None:
    model = sw.shard(build())
    with sw.full_parameters(model):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with (
        pytest.raises(sw.ShardwiseError, match=r"0\.weight.*writeback"),
        sw.full_parameters(model),
        torch.no_grad(),
    ):
        model[0].weight.add_(1)
    with (
        pytest.raises(ZeroDivisionError),
        sw.full_parameters(model, writeback=True),
        torch.no_grad(),
    ):
        model[0].weight.add_(1 / (dist.get_rank() * 0))
    with sw.full_parameters(model):
        assert_bit_equal(dict(model.named_parameters()), before)
    with sw.full_parameters(model, writeback=True):
        nn.init.constant_(model[0].weight, float(dist.get_rank() + 1))
    with sw.full_parameters(model):
        assert torch.equal(model[0].weight, torch.ones(7, 5))
        assert torch.equal(model[0].bias, before["0.bias"])


@pytest.mark.world_size(2)
def test_a_step_inside_full_parameters_is_refused() -> None:
    model = sw.shard(nn.Linear(4, 3))
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.backward(model(torch.ones(1, 4)).sum())
    with sw.full_parameters(model), pytest.raises(sw.ShardwiseError, match="full_parameters"):
        optimizer.step()
    optimizer.step()


@pytest.mark.world_size(2, 3)
def test_a_write_inside_forward_is_kept() -> None:
    """As in plain PyTorch, where every rank writes the same."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-2, 2, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return (x * self.weight).sum()

    for precision in (None, sw.MixedPrecision(param_dtype=torch.bfloat16)):
        model = sw.shard(Clamped(), mixed_precision=precision)
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        optimizer.backward(model(torch.ones(7)))
        optimizer.step()
        with sw.full_parameters(model):
            expected = torch.linspace(-2, 2, 7).clamp(-1, 1) - 1  # masters stay exact
            assert torch.equal(model.weight, expected.to(model.weight.dtype))
