"""Tiny models, one for each thing that goes wrong in sharding, and the loss to train them with.

Sizes are odd on purpose: nothing divides by a world size. `CASES` pairs each model with a loss
that draws its own inputs, so a test needs no data: seed, then call (`tests.kit.oracle.seed`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Recompute = Literal["reentrant", "non-reentrant"]


class OddMLP(nn.Module):
    """123 -> 253 -> 512 with a layer in between that forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(123, 253)
        self.unused = nn.Linear(253, 253)
        self.last = nn.Linear(253, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyGPTConfig:
    """What a `TinyGPT` can vary in."""

    vocabulary: int = 61
    width: int = 28
    num_heads: int = 4
    num_blocks: int = 2
    length: int = 11
    dropout: float = 0.0
    is_tied: bool = True
    recompute: Recompute | None = None


class _Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: TinyGPTConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BTC)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x_BTC + self.dropout(self.down(F.gelu(self.up(self.norm2(x_BTC)))))


class TinyGPT(nn.Module):
    """A decoder with learned positions; by default embedding and output share their weight."""

    def __init__(self, config: TinyGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.is_tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            if self.config.recompute is None:
                x_BTC = block(x_BTC)
            else:
                is_reentrant = self.config.recompute == "reentrant"
                x_BTC = checkpoint(block, x_BTC, use_reentrant=is_reentrant)
        return self.output(self.norm(x_BTC))


class ConvNorm(nn.Module):
    """Convolution and batch norm: buffers that differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3)
        self.norm = nn.BatchNorm2d(7)
        self.output = nn.Linear(7, 5)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.output(F.relu(self.norm(self.conv(x_BCHW))).mean((2, 3)))


class TinyLSTM(nn.Module):
    """A module that keeps a list of its own weights beside its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 9)
        self.lstm = nn.LSTM(9, 13, num_layers=2, batch_first=True)
        self.output = nn.Linear(13, 17)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens_BT))
        return self.output(hidden)


class OddShapes(nn.Module):
    """Parameters of shape (), (1,), (1, 1), (0,) and (0, 4), and one that hangs on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.tensor([0.25]))
        self.one_by_one = nn.Parameter(torch.tensor([[2.0]]))
        self.nothing = nn.Parameter(torch.empty(0))
        self.hanging = nn.Parameter(torch.linspace(-1, 1, 5))
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
        self.zero_rows = nn.Parameter(torch.empty(0, 4))

    def forward(self, x_BC: Tensor) -> Tensor:
        y_BC = self.body(x_BC * self.hanging) * self.one * self.one_by_one + self.scalar
        empty = F.linear(y_BC, self.zero_rows).sum() + self.nothing.sum()
        return y_BC + empty


class TwoOutputs(nn.Module):
    """Two heads over one body; a loss may use one of them, the other or both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x_BC: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x_BC))
        return self.left(hidden), self.right(hidden)


Loss = Callable[[nn.Module], Tensor]
"""Draws inputs from torch's generator and returns the loss of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model with its loss."""

    name: str
    build: Callable[[], nn.Module] = field(repr=False)
    loss: Loss = field(repr=False)


def _mean_square(model: nn.Module, *, shape: tuple[int, ...]) -> Tensor:
    return model(torch.randn(shape)).float().square().mean()


def _next_token(model: nn.Module, *, vocabulary: int, length: int) -> Tensor:
    tokens = torch.randint(vocabulary, (3, length + 1))
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _both_outputs(model: nn.Module) -> Tensor:
    left, right = model(torch.randn(4, 6))
    return left.float().square().mean() + right.float().abs().mean()


def gpt_case(name: str, config: TinyGPTConfig) -> Case:
    """Return a `TinyGPT` that learns to predict random tokens."""
    loss = partial(_next_token, vocabulary=config.vocabulary, length=config.length)
    return Case(name=name, build=partial(TinyGPT, config), loss=loss)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(name="mlp", build=OddMLP, loss=partial(_mean_square, shape=(4, 123))),
        gpt_case("gpt", TinyGPTConfig()),
        gpt_case("gpt-dropout", TinyGPTConfig(dropout=0.2)),
        gpt_case("gpt-untied", TinyGPTConfig(is_tied=False)),
        gpt_case("gpt-reentrant", TinyGPTConfig(dropout=0.2, recompute="reentrant")),
        gpt_case("gpt-non-reentrant", TinyGPTConfig(dropout=0.2, recompute="non-reentrant")),
        Case(name="conv", build=ConvNorm, loss=partial(_mean_square, shape=(4, 3, 8, 8))),
        Case(name="lstm", build=TinyLSTM, loss=partial(_next_token, vocabulary=17, length=6)),
        Case(name="odd-shapes", build=OddShapes, loss=partial(_mean_square, shape=(4, 5))),
        Case(name="two-outputs", build=TwoOutputs, loss=_both_outputs),
    )
}
"""Every case by name: `@pytest.mark.parametrize("case", CASES)` gives readable test ids."""
