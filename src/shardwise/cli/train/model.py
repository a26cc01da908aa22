"""A small decoder-only GPT over bytes: rotary positions, pre-norm, tied embedding, no biases.

Plain torch and nothing of shardwise: the same class is trained sharded and, for the comparison,
in one process.
"""

# Shapes: B samples, T bytes, D width, H heads, K = D / H.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 256
"""Tokens are bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The numbers that make a model larger or smaller."""

    width: int
    """Length of the vector of one byte."""

    depth: int
    """Number of blocks."""

    heads: int
    """Attention heads per block; divides the width into even parts."""


SIZES: dict[str, ModelSize] = {
    "tiny": ModelSize(width=64, depth=2, heads=2),
    "small": ModelSize(width=128, depth=4, heads=2),
    "medium": ModelSize(width=256, depth=6, heads=4),
    "large": ModelSize(width=512, depth=8, heads=8),
    "deep": ModelSize(width=384, depth=24, heads=6),
}
"""0.1, 0.8, 4.8, 25 and 43 million parameters."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Mix each byte with those before it."""
        batch, length, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, length, 3, self.heads, width // self.heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q_BHTK, k_BHTK = _rotate(q_BHTK, *rotation), _rotate(k_BHTK, *rotation)
        mixed = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a perceptron, each on normed input and added to what came in."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width, bias=False)
        self.attention = Attention(size)
        self.up_norm = nn.LayerNorm(size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the block's output, of the input's shape."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation)
        return x_BTD + self.down(F.gelu(self.up(self.up_norm(x_BTD))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the output matrix is the embedding (tied)."""

    def __init__(self, size: ModelSize, *, sequence: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width, bias=False)
        cosine, sine = _rotary_table(sequence, size.width // size.heads)
        self.register_buffer("cosine", cosine, persistent=False)  # [T, K / 2]
        self.register_buffer("sine", sine, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the stream is drawn narrower, so that its sum over the blocks
                # starts with the size of one block's.
                is_added = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / (math.sqrt(2 * size.depth) if is_added else 1)
                )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits, [B, T, 256], in the dtype of the weights."""
        length = tokens_BT.shape[1]
        x_BTD = self.embedding(tokens_BT)
        rotation = (self.cosine[:length].to(x_BTD.dtype), self.sine[:length].to(x_BTD.dtype))
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation)
        return F.linear(self.norm(x_BTD), self.embedding.weight)

    @torch.no_grad()
    def generate(self, prompt: bytes, *, length: int, seed: int, temperature: float = 0.7) -> bytes:
        """Write on from a prompt, one byte at a time.

        Args:
            prompt: At least one byte to start from.
            length: How many bytes to write.
            seed: Seeds the choice of bytes; the model's own random state is left alone.
            temperature: Below 1 the likely bytes get likelier.

        Returns:
            The new bytes alone.
        """
        device = self.embedding.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(length):
            context = torch.tensor([text[-self.sequence :]], device=device)
            logits = self(context)[0, -1].float().cpu() / temperature
            text.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        return bytes(text[len(prompt) :])


def build_model(size: str, *, sequence: int, seed: int) -> GPT:
    """Build a model whose weights are a function of its size and the seed alone.

    The process's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(SIZES[size], sequence=sequence)


def next_byte_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, computed in fp32 whatever the weights are."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def _rotary_table(sequence: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [T, K / 2]."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x_BHTK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of a head's vector by its position's angle."""
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
