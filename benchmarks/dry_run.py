"""A dry run of stage 3: bytes per rank of a model that no machine at hand could hold.

Forward, backward and step of a Llama-shaped model on one of many ranks that do not exist, under
torch's ``FakeTensorMode`` and "fake" process group: shapes only, no memory, no communication.

    python -m benchmarks.dry_run --size 70b --ranks 1024
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.report import held_bytes
from shardwise.shard import engine_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.report import HeldBytes

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a decoder with grouped-query attention and a gated MLP."""

    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    num_blocks: int
    vocabulary: int


SHAPES = {
    "70b": LlamaShape(
        width=8192, hidden=28672, num_heads=64, num_kv_heads=8, num_blocks=80, vocabulary=128256
    ),
    "8b": LlamaShape(
        width=4096, hidden=14336, num_heads=32, num_kv_heads=8, num_blocks=32, vocabulary=128256
    ),
    "tiny": LlamaShape(
        width=64, hidden=160, num_heads=4, num_kv_heads=2, num_blocks=3, vocabulary=512
    ),
}


class Block(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, shape: LlamaShape) -> None:
        """Make the layers."""
        super().__init__()
        width, kv_width = shape.width, shape.width // shape.num_heads * shape.num_kv_heads
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = nn.Linear(width, width, False), nn.Linear(width, width, False)
        self.key, self.value = nn.Linear(width, kv_width, False), nn.Linear(width, kv_width, False)
        self.gate, self.up = (nn.Linear(width, shape.hidden, False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, width, False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Add attention, then the MLP."""
        y_BTC = self.norm1(x_BTC)
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in (
                (self.query(y_BTC), self.num_heads),
                (self.key(y_BTC), self.num_kv_heads),
                (self.value(y_BTC), self.num_kv_heads),
            )
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BTC = x_BTC + self.out(attended.transpose(1, 2).flatten(2))
        y_BTC = self.norm2(x_BTC)
        return x_BTC + self.down(F.silu(self.gate(y_BTC)) * self.up(y_BTC))


class Llama(nn.Module):
    """Token logits."""

    def __init__(self, shape: LlamaShape) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.norm = nn.RMSNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Embed, transform, project."""
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.output(self.norm(x_BTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What one rank would hold."""

    numel: int
    held: HeldBytes
    gathered_peak_bytes: int
    """Whole chunks at the height of a step."""
    elapsed_s: float


def dry_run(
    shape: LlamaShape,
    *,
    num_ranks: int,
    sequence: int = 2048,
    offload: sw.StaticOffload | None = None,
) -> DryRun:
    """Train two steps without memory; starts and ends torch.distributed in this process."""
    began_s = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with FakeTensorMode():
            model = Llama(shape)
            numel = sum(parameter.numel() for parameter in model.parameters())
            precision = sw.MixedPrecision(param_dtype=torch.bfloat16)
            sw.shard(model, mixed_precision=precision, offload=offload)
            adamw = torch.optim.AdamW(model.parameters(), fused=True)
            optimizer = sw.ShardedOptimizer(adamw, clip_grad_norm=1.0)
            for _ in range(2):  # the second one follows the recorded order
                logits_BTV = model(torch.zeros(1, sequence, dtype=torch.int64))
                optimizer.backward(logits_BTV.float().logsumexp(-1).mean())
                optimizer.step()
                optimizer.zero_grad()
            residence = engine_of(model).residence
            return DryRun(
                numel=numel,
                held=held_bytes(model, optimizer),
                gathered_peak_bytes=residence.gatherer.peak_bytes if residence else 0,
                elapsed_s=time.perf_counter() - began_s,
            )
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print bytes per rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=tuple(SHAPES), default="70b")
    parser.add_argument("--ranks", type=int, default=1024)
    given = parser.parse_args(arguments)
    result = dry_run(SHAPES[given.size], num_ranks=given.ranks)
    share = result.numel / given.ranks
    print(
        f"{result.numel / 1e9:.1f} B parameters on {given.ranks} ranks, bfloat16 with masters\n"
        f"parameters       {result.held.parameters / _GIB:8.3f} GiB per rank "
        f"(closed form {2 * share / _GIB:.3f})\n"
        f"optimizer state  {result.held.optimizer_state / _GIB:8.3f} GiB per rank "
        f"(closed form {12 * share / _GIB:.3f})\n"
        f"gathered, peak   {result.gathered_peak_bytes / _GIB:8.3f} GiB\n"
        f"this dry run took {result.elapsed_s:.0f} s"
    )


if __name__ == "__main__":
    main()
