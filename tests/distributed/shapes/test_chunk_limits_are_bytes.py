"""A chunk's limit is bytes, whatever the dtype; a larger parameter gets a chunk of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.shard import engine_of
from tests.kit.pair import FACES, Face, Pair, Setting, stages_of


class _Sizes(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self) -> Tensor:
        return sum((p * torch.randn(p.shape)).sum() for p in self.parameters())


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model()


@pytest.mark.world_size(2, timeout_s=20)
@pytest.mark.parametrize("face", FACES)
def test_a_parameter_may_be_larger_than_a_chunk(face: Face) -> None:
    """64 elements a chunk: exactly that, one less, one more, and far more."""
    for stage in stages_of(face):
        for sizes in ((10, 1000, 10), (64,), (63, 64, 65), (65, 1)):
            setting = Setting(stage=stage, face=face, shard={"chunk_bytes": 64 * 4})
            Pair(lambda sizes=sizes: _Sizes(*sizes), setting=setting).train(_loss, num_steps=2)


@pytest.mark.parametrize(
    ("dtype", "sizes", "plan"),
    [
        # 256 bytes: 64 float32, 128 bfloat16, 32 float64
        (torch.float32, (32, 32, 16), [[0, 1], [2]]),
        (torch.float32, (64, 16), [[0], [1]]),
        (torch.float32, (65, 16), [[0], [1]]),
        (torch.bfloat16, (64, 64, 32), [[0, 1], [2]]),
        (torch.bfloat16, (128, 32), [[0], [1]]),
        (torch.float64, (16, 16, 8), [[0, 1], [2]]),
        (torch.float64, (32, 8), [[0], [1]]),
    ],
)
def test_chunk_limits_are_bytes(
    dtype: torch.dtype, sizes: tuple[int, ...], plan: list[list[int]]
) -> None:
    model = sw.shard(_Sizes(*sizes).to(dtype), stage=2, chunk_bytes=256)
    chunks = engine_of(model).chunks
    assert [[record.index for record in chunk.records] for chunk in chunks] == plan
