"""Train on the first ranks of a world, save, and load on the first ranks of another size.

A mesh of the first N ranks of four stands for a job of N ranks; ranks outside of it wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from tests.kit.pair import parameters

if TYPE_CHECKING:
    from collections.abc import Callable


class Everything(nn.Module):
    """What a checkpoint must get right: tied, frozen, unused and empty parameters, odd strides.

    Also a scalar, buffers of three kinds, and dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.conv = nn.Conv2d(2, 3, 2)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Linear(6, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.tensor([1.5]))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.mixed = nn.Parameter(torch.randn(5, 3).t())
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens_BT: Tensor, images_BCHW: Tensor) -> Tensor:
        hidden = F.dropout(self.embedding(tokens_BT), 0.2, self.training)
        seen = self.norm(self.conv(images_BCHW)).mean((2, 3)) @ self.mixed
        logits = self.head(hidden) * self.scale + self.one
        return logits.square().mean() + (self.frozen(hidden).mean(1) * seen).mean()


def draw_loss(model: nn.Module) -> Tensor:
    """Return a loss over inputs that torch draws now."""
    parameter = next(iter(model.parameters()))
    dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
    images = torch.randn(2, 2, 4, 4).contiguous(memory_format=torch.channels_last)
    return model(torch.randint(13, (2, 4)), images.to(dtype))


def adamw_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over two groups, the second without decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    rest = [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How one job is set up."""

    stage: int = 3
    size: int | None = None
    """Ranks, the first of the world; None takes all of it, without a mesh."""
    precision: sw.MixedPrecision | None = None
    is_plain: bool = False
    """The optimizer alone shards; the model is a plain one."""
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw_groups
    build: Callable[[], nn.Module] = Everything
    shard: dict[str, Any] = field(default_factory=dict)
    """More arguments of whatever shards."""

    def start(self, *, seed: int) -> tuple[nn.Module, Any] | None:
        """Return model and optimizer on ranks that take part, None on others."""
        options: dict[str, Any] = {
            "stage": self.stage,
            "mixed_precision": self.precision,
            **self.shard,
        }
        if self.size is not None:
            options["mesh"] = DeviceMesh("cpu", list(range(self.size)))
            if dist.get_rank() >= self.size:
                return None
        torch.manual_seed(seed)
        model = self.build()
        if not self.is_plain:
            sw.shard(model, **options)
            options = {}
        return model, sw.ShardedOptimizer(self.make_optimizer(model), clip_grad_norm=1.0, **options)


def train(model: nn.Module, optimizer: Any, num_steps: int) -> list[float]:
    """Take some steps with what torch draws next, and return the losses."""
    losses = []
    for _ in range(num_steps):
        loss = draw_loss(model)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def exact_values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return every parameter whole, as its master where it has one."""
    values = parameters(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    members = [names[member.parameter] for member in optimizer._binding.members()]
    masters = optimizer.state_dict().get("shardwise", {}).get("masters", {})
    return values | {members[index]: master for index, master in masters.items()}


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return copies of everything that a checkpoint must bring back, whole."""
    return {
        "parameters": exact_values(model, optimizer),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "optimizer": optimizer.state_dict(),
    }
