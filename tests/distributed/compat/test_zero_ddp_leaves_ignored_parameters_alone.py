"""Parameters given to `set_params_to_ignore`: whole, in the working dtype, of each rank alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.compat.colossalai import ColoDDP, ZeroDDP
from shardwise.errors import ConfigurationError
from shardwise.runtime.managed import record_of
from tests.distributed.compat.zero_ddp_kit import MODES

IGNORED = ("0.weight", "1.weight")


def build() -> nn.Sequential:
    """Return a model that differs over ranks in what is ignored; a batch norm is part of that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for name in IGNORED:
            model.get_parameter(name).add_(dist.get_rank())
    return model


def everyone(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_ignored_parameters_keep_values_and_gradients_of_their_rank(mode: dict[str, bool]) -> None:
    inner = build()
    own = {name: inner.get_parameter(name).detach().clone() for name in IGNORED}
    ZeroDDP.set_params_to_ignore([inner.get_parameter(name) for name in IGNORED])
    with pytest.warns(UserWarning, match="0.weight, 1.weight"):
        model = ZeroDDP(inner, mixed_precision=torch.bfloat16, **mode)
    assert isinstance(model, ColoDDP)
    weight, scale = (inner.get_parameter(name) for name in IGNORED)
    assert (weight.dtype, scale.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(weight, own["0.weight"].bfloat16())
    assert torch.equal(scale, own["1.weight"])
    assert dict(model.named_parameters())["0.weight"] is weight
    chosen = [p for name, p in model.named_parameters() if name not in IGNORED]
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(chosen, lr=0.1))
    for _ in range(2):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
        optimizer.backward(model(x).float().square().mean())
        for parameter in (weight, scale):
            assert record_of(parameter) is None
            assert parameter.grad is not None
            mine, other = everyone(parameter.grad)
            assert not torch.equal(mine, other)
        for parameter in chosen:
            gradient = sw.full_gradient(parameter)
            assert gradient is not None
            assert torch.equal(*everyone(gradient))
        optimizer.step()
        assert torch.equal(weight, own["0.weight"].bfloat16())
        model.zero_grad(set_to_none=True)
        assert weight.grad is None
    state = model.state_dict(only_rank_0=False)
    assert torch.equal(state["0.weight"], own["0.weight"].bfloat16().float())
    model.load_state_dict({name: torch.ones_like(value) for name, value in state.items()})
    assert torch.equal(weight, torch.ones(4, 3, dtype=torch.bfloat16))


@pytest.mark.world_size(1)
def test_nothing_is_said_about_frozen_ones_and_too_late_is_refused() -> None:
    inner = build()
    inner[0].requires_grad_(False)
    ZeroDDP.set_params_to_ignore(inner[0].parameters())
    ZeroDDP(inner)
    assert record_of(inner[0].get_parameter("bias")) is None
    with pytest.raises(ConfigurationError, match="before"):
        ZeroDDP.set_params_to_ignore(inner[2].parameters())


@pytest.mark.world_size(1)
def test_a_refused_module_keeps_the_dtype_of_what_was_to_be_ignored() -> None:
    inner = build()
    ZeroDDP.set_params_to_ignore(inner[0].parameters())
    with pytest.raises(ConfigurationError, match="chunk_bytes"):
        ZeroDDP(inner, chunk_bytes=0)
    assert {p.dtype for p in inner.parameters()} == {torch.float32}
