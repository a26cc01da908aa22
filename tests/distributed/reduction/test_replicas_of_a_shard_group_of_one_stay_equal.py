"""A shard group of one rank still reduces over its replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.kit.pair import STAGES, Pair, Setting, sgd


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.world_size(3, timeout_s=20)
@pytest.mark.parametrize("form", ["mesh", "shard_size"])
def test_replicas_of_a_shard_group_of_one_stay_equal(form: str) -> None:
    """Stage 0 is such a group by itself, so it takes the mesh's replicate axis alone."""
    for stage in STAGES:
        shard: dict[str, object] = {"shard_size": 1}
        if form == "mesh":
            mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard"))
            shard = {"mesh": mesh["replicate"] if stage == 0 else mesh}
        Pair(_model, sgd, setting=Setting(stage=stage, shard=shard)).train(_loss)


@pytest.mark.world_size(4, timeout_s=20)
@pytest.mark.parametrize("shard_size", [1, 2, 4])
def test_hybrid_meshes_train_as_one_process(shard_size: int) -> None:
    """The sum runs inside each shard group first, then over the groups."""
    for stage in (1, 2):
        setting = Setting(stage=stage, shard={"shard_size": shard_size}, run_size=shard_size)
        Pair(_model, sgd, setting=setting).train(_loss)
