"""An inf-norm looks at all ranks, and a rank that owns nothing of a parameter adds nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import STAGES, Pair, Setting, parameters, sgd


class _Small(nn.Module):
    """Less than one element a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Parameter(torch.randn(3))
        self.matrix = nn.Parameter(torch.randn(5, 7))
        self.one = nn.Parameter(torch.randn(1))

    def forward(self, peak: str) -> Tensor:
        total = sum((p.flatten() * torch.randn(p.numel())).sum() for p in self.parameters())
        return total + 50 * dict(self.named_parameters())[peak].flatten()[-1]


def _peak_at(name: str) -> object:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(name)

    return loss


@pytest.mark.world_size(2, 4, timeout_s=20)
def test_largest_gradient_is_global() -> None:
    """The largest element moves through the parameters, so it lies with different owners."""
    for chunk_bytes in (None, 4):
        for stage in STAGES:
            setting = Setting(
                stage=stage,
                shard={"chunk_bytes": chunk_bytes},
                wrap={"clip_grad_norm": 0.5, "norm_type": math.inf},
            )
            pair = Pair(_Small, sgd, setting=setting)
            for name in ("three", "matrix", "one"):
                pair.backward(_peak_at(name))
                norm = torch.nn.utils.clip_grad_norm_(
                    pair.plain.parameters(), 0.5, norm_type=math.inf
                )
                pair.step()
                assert pair.optimizer.grad_norm == norm.item()
                # the coefficient is a double here and a float32 in torch
                torch.testing.assert_close(
                    parameters(pair.model), parameters(pair.plain), rtol=1e-6, atol=1e-7
                )
