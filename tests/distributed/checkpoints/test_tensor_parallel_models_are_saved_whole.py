"""A model that tensor parallelism splits is saved under whole shapes, and read without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw
from tests.kit.oracle import assert_bit_equal

if TYPE_CHECKING:
    from pathlib import Path


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 22), nn.Linear(22, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _start(seed: int, stage: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(_Block(), mesh["tp"], plan)
    sw.shard(model, stage=stage, mesh=mesh["dp"])
    return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def _step(model: nn.Module, optimizer: Any) -> None:
    optimizer.backward(model(torch.linspace(-1, 1, 24).view(3, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _values(model: nn.Module) -> dict[str, Tensor]:
    with sw.full_parameters(model):
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


@pytest.mark.world_size(4, timeout_s=60)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_split_parameters_and_their_state_come_back_whole(stage: int, tmp_path: Path) -> None:
    model, optimizer = _start(1, stage)
    _step(model, optimizer)
    expected = _values(model)
    sw.save(tmp_path / "checkpoint", model, optimizer)
    _step(model, optimizer)
    later = _values(model)

    plain = _Block()
    its_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    sw.load(tmp_path / "checkpoint", plain, its_optimizer)
    assert_bit_equal(dict(plain.named_parameters()), expected)
    for parameter in plain.parameters():
        assert its_optimizer.state[parameter]["exp_avg"].shape == parameter.shape
        assert its_optimizer.state[parameter]["step"] == 1

    resumed, its_optimizer = _start(2, stage)
    sw.load(tmp_path / "checkpoint", resumed, its_optimizer)
    assert_bit_equal(_values(resumed), expected)
    _step(resumed, its_optimizer)
    assert_bit_equal(_values(resumed), later)
    dist.barrier()
