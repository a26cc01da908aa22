"""`get_static_torch_model`: an independent, unsharded module of the same class and exact values."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.compat.colossalai import ZeroDDP, get_static_torch_model
from tests.distributed.compat.zero_ddp_kit import MODES, build, exact, is_at_rest
from tests.kit.models import CASES
from tests.kit.oracle import assert_bit_equal

NAMES = ("odd-shapes", "conv", "gpt", "lstm")


def train(name: str, **arguments: object) -> ZeroDDP:
    """Return a wrapper with values that no 16-bit parameter could hold."""
    case = CASES[name]
    model, optimizer = build(case.build, mixed_precision=torch.bfloat16, **arguments)
    optimizer.backward(case.loss(model))
    optimizer.step()
    optimizer.zero_grad()
    return model


@pytest.mark.world_size(1, 2, 3)
def test_copies_are_plain_exact_and_independent(world_size: int) -> None:
    for name in NAMES:
        case = CASES[name]
        for mode in MODES if name == "gpt" else MODES[:1]:
            model = train(name, **mode)
            before, buffers = exact(model), {n: b.clone() for n, b in model.named_buffers()}
            plain = get_static_torch_model(model, only_rank_0=False)
            assert type(plain) is type(model.module)
            assert all(type(p) is nn.Parameter for p in plain.parameters())
            assert_bit_equal(dict(plain.named_parameters()), before, what=name)
            assert_bit_equal(dict(plain.named_buffers()), buffers, what=name)
            same = case.build()
            assert list(plain.state_dict()) == list(same.state_dict())
            assert [vars(m).keys() for m in plain.modules()] == [
                vars(m).keys() for m in same.modules()
            ]
            pickled = pickle.dumps(plain)
            assert b"shardwise" not in pickled
            case.loss(plain).backward()
            torch.optim.SGD(plain.parameters(), lr=1.0).step()
            assert_bit_equal(exact(model), before, what=name)
            assert_bit_equal(dict(model.named_buffers()), buffers, what=name)
            assert is_at_rest(model)
            case.loss(model)  # the source still computes


@pytest.mark.world_size(2)
def test_ties_flags_and_hooks_of_users_are_copied() -> None:
    calls: list[str] = []
    model = train("gpt")
    inner = model.module
    inner.norm.weight.requires_grad_(False)
    inner.norm.register_forward_hook(lambda *_: calls.append("hook"))
    model.eval()
    plain = get_static_torch_model(model, only_rank_0=False)
    assert plain.output.weight is plain.embedding.weight
    assert inner.output.weight is inner.embedding.weight
    assert not plain.norm.weight.requires_grad
    assert plain.position.requires_grad
    assert not plain.training
    CASES["gpt"].loss(plain)
    assert calls == ["hook"]


@pytest.mark.world_size(2)
def test_the_first_rank_alone_holds_values_unless_all_are_asked_for() -> None:
    for mode in MODES[:2]:
        model = train("conv", **mode)
        before = exact(model)
        plain = get_static_torch_model(model, torch.device("cpu"), torch.float16)
        tensors = [*plain.parameters(), *plain.buffers()]
        if dist.get_rank():
            assert all(tensor.is_meta for tensor in tensors)
            assert {p.dtype for p in plain.parameters()} == {torch.float16}
        else:
            expected = {name: value.half() for name, value in before.items()}
            assert_bit_equal(dict(plain.named_parameters()), expected)
            assert plain.norm.running_mean.dtype is torch.float32
        assert [n for n, _ in plain.named_buffers()] == [n for n, _ in model.named_buffers()]


class Nested(nn.Module):
    """A parameter used by a function, and one handed to another module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.inner = nn.Bilinear(3, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.linear(x, self.weight), x)


@pytest.mark.world_size(2)
def test_hanging_parameters_are_copied_as_they_hang() -> None:
    model, optimizer = build(Nested, mixed_precision=torch.bfloat16)
    optimizer.backward(model(torch.randn(2, 4)).float().sum())
    optimizer.step()
    plain = get_static_torch_model(model, only_rank_0=False)
    assert_bit_equal(dict(plain.named_parameters()), exact(model))
    plain(torch.randn(2, 4)).sum().backward()
