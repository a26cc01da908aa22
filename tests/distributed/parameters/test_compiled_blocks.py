"""Blocks under torch.compile: no break inside one, no new compilation after the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import shardwise as sw


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


# torch's compiler reads .grad of every input, activations too, in plain modules as well
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.world_size(2, timeout_s=90)
@pytest.mark.parametrize("when", ["before", "after", "wrapped"])
def test_blocks_compile_once_and_whole(when: str) -> None:
    torch._dynamo.reset()
    num_compilations = 0

    def backend(graph, inputs, **options):
        nonlocal num_compilations
        num_compilations += 1
        return aot_eager(graph, inputs, **options)

    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    model = Model()
    if when == "before":
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    if when == "wrapped":
        compiled = [torch.compile(b, backend=backend, fullgraph=True) for b in model.blocks]
        model.blocks = nn.ModuleList(compiled)
    sw.shard(model)
    if when == "after":
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    after_first = 0
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss, expected = model(x), plain(x)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        optimizer.backward(loss)
        expected.backward()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        after_first = after_first or num_compilations
    assert num_compilations == after_first == 1  # blocks share their code
