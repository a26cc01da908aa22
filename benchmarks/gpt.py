"""The model that contestants train: a plain GPT decoder, untied, 30.5 M parameters by default."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Size of the model and of one rank's batch."""

    width: int = 512
    num_blocks: int = 7
    num_heads: int = 8
    vocabulary: int = 8192
    sequence: int = 128
    batch: int = 4


SIZES = {
    "full": GPTConfig(),
    "tiny": GPTConfig(width=32, num_blocks=1, num_heads=2, vocabulary=64, sequence=16, batch=2),
}


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the layers."""
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Add attention, then the MLP."""
        qkv = self.qkv(self.norm1(x_BTC)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(attended.transpose(1, 2).flatten(2))
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class GPT(nn.Module):
    """Returns the mean next-token loss."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.num_blocks)))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Predict every token but the first from those before it."""
        inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        positions_T = torch.arange(inputs_BT.shape[1])
        x_BTC = self.embedding(inputs_BT) + self.position(positions_T)
        logits_BTV = self.output(self.norm(self.blocks(x_BTC)))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
