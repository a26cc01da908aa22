"""Modules that are split over one axis of a mesh and wrapped over the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw
from shardwise.compat.colossalai import ZeroDDP, get_static_torch_model
from shardwise.errors import ConfigurationError
from tests.kit.oracle import assert_bit_equal


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 26), nn.Linear(26, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(mesh: DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(0)
    block = Block()
    if mesh is not None:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return block


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}


@pytest.mark.world_size(4)
def test_two_by_two_trains_and_keeps_its_parts() -> None:
    """Saved are the parts of this rank; loaded are these, or whole values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = build()
    with pytest.raises(ConfigurationError, match="strict_ddp_mode"):
        ZeroDDP(build(mesh["tp"]), strict_ddp_mode=True)
    group = mesh["dp"].get_group()
    model = ZeroDDP(build(mesh["tp"]), process_group=group, mixed_precision=torch.bfloat16)
    initial = model.state_dict(only_rank_0=False)
    assert isinstance(initial["up.weight"], DTensor)
    assert initial["up.weight"].to_local().shape == (13, 8)
    assert_bit_equal(whole(initial), plain.state_dict())
    assert bool(model.state_dict()) is (mesh["dp"].get_local_rank() == 0)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    optimizer.backward(model(x[mesh["dp"].get_local_rank()]).float().square().mean())
    plain(x).square().mean().backward()
    optimizer.step()
    reference.step()
    for name, value in whole(model.state_dict(only_rank_0=False)).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=2e-3)
    copied = get_static_torch_model(model, only_rank_0=False)
    torch.testing.assert_close(copied(x[0]), plain(x[0]), rtol=0, atol=2e-2)
    for state in (initial, plain.state_dict()):
        model.load_state_dict(state)
        assert_bit_equal(whole(model.state_dict(only_rank_0=False)), whole(state))
    dist.barrier()
