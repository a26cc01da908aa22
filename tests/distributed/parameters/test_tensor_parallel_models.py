"""Models that torch's tensor parallelism has split shard what each rank has over the data axis."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def split(model: nn.Module, mesh) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.world_size(4, timeout_s=90)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_by_two_trains_like_one_process(stage: int) -> None:
    """Clipped, so that the norm must count split parameters over tp and copies once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    model = sw.shard(split(Model(), mesh["tp"]), stage=stage, mesh=mesh["dp"])
    optimizer = sw.ShardedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), clip_grad_norm=0.1
    )
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
        optimizer.backward(model(x[mesh["dp"].get_local_rank()]).square().mean())
        (plain(x[0]).square().mean() / 2 + plain(x[1]).square().mean() / 2).backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            gradient = sw.full_gradient(mine)
            assert gradient is not None, name
            torch.testing.assert_close(whole(gradient), theirs.grad, msg=name)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    saved = {name: whole(value) for name, value in model.state_dict().items()}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(saved[name], value, msg=name)


@pytest.mark.world_size(4, timeout_s=60)
def test_local_parts_are_sharded_and_released() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sw.shard(
        split(Model(), mesh["tp"]),
        mesh=mesh["dp"],
        mixed_precision=sw.MixedPrecision(param_dtype=torch.bfloat16),
    )
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    [engine] = optimizer._binding.engines()
    losses = []
    for _ in range(6):
        loss = model(torch.ones(3, 8)).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    gatherer = engine.residence.gatherer
    assert gatherer.gathered_bytes == 0
    assert 0 < gatherer.peak_bytes <= gatherer.limit_bytes
    assert isinstance(model.blocks[0].up.weight, DTensor)
    assert model.blocks[0].up.weight.shape == (24, 8)
    assert model.blocks[0].up.weight.dtype == torch.bfloat16
    with pytest.raises(sw.ShardwiseError, match="full_parameters"):
        model.blocks[0].up.weight.sum()
    state = model.state_dict()
    fresh = split(Model(), mesh["tp"])
    fresh.load_state_dict(state)
    model.load_state_dict(state)


@pytest.mark.world_size(2)
def test_a_data_axis_must_be_named() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(sw.ConfigurationError, match=r"mesh=mesh\['dp'\]"):
        sw.shard(split(Model(), mesh["tp"]))
    with torch.device("meta"):
        model = Model()
    with pytest.raises(sw.ConfigurationError, match="DTensors on the meta device"):
        sw.shard(split(model, mesh["tp"]), mesh=mesh["dp"])
    assert dist.is_initialized()
