"""bfloat16 gradients are added up in the asked-for float32: 256 + 1 - 256 is 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.kit.pair import FACES, Face, parameters, stages_of


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, factor: float) -> Tensor:
        return (factor * self.weight).sum()


@pytest.mark.world_size(1, 2, 4, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_small_gradients_survive_accumulation(world_size: int, face: Face) -> None:
    """`num_local` of the three passes run under no_sync; 4 ranks also as a 2-D mesh."""
    for num_local in (0, 2, 3):
        precision = sw.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        meshes = [{}, {"shard_size": 2}] if world_size == 4 else [{}]
        for stage, mesh in [(stage, mesh) for stage in stages_of(face) for mesh in meshes]:
            if stage == 0 and mesh:
                continue
            model = _Weight()
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            if face == "module":
                sw.shard(model, stage=stage, mixed_precision=precision, **mesh)
                optimizer = sw.ShardedOptimizer(inner)
            else:
                optimizer = sw.ShardedOptimizer(
                    inner, stage=stage, mixed_precision=precision, **mesh
                )
            for micro_batch, factor in enumerate((256.0, 1.0, -256.0)):
                if micro_batch < num_local:
                    with optimizer.no_sync():
                        optimizer.backward(model(factor))
                else:
                    optimizer.backward(model(factor))
            optimizer.step()
            assert parameters(model)["weight"].tolist() == [0.0] * 4, (stage, mesh)
