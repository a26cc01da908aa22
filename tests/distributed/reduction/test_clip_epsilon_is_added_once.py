"""The clip coefficient is that of one process even where the norm is as small as its epsilon."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.kit.pair import STAGES, Pair, Setting, parameters, sgd

_LIMIT = 1e-6


def _model() -> nn.Module:
    return nn.Linear(5, 3, dtype=torch.float64)


def _small_loss(model: nn.Module, rank: int) -> Tensor:
    return 1e-6 * model(torch.randn(4, 5, dtype=torch.float64)).square().mean()


@pytest.mark.world_size(1, 4, timeout_s=20)
@pytest.mark.parametrize("form", ["option", "method"])
def test_clip_epsilon_is_added_once(form: str) -> None:
    """The update is the coefficient times the gradient, so it shows the coefficient itself."""
    for stage in STAGES:
        wrap = {"clip_grad_norm": _LIMIT} if form == "option" else {}
        pair = Pair(_model, sgd, setting=Setting(stage=stage, wrap=wrap))
        for _ in range(2):
            before = [p.detach().clone() for p in pair.plain.parameters()]
            pair.backward(_small_loss)
            norm = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), _LIMIT).item()
            assert 1e-7 < norm < 1e-5
            if form == "method":
                assert pair.optimizer.clip_grad_norm_(_LIMIT).item() == pytest.approx(
                    norm, rel=1e-6
                )
            pair.step()
            assert pair.optimizer.grad_norm == pytest.approx(norm, rel=1e-9)
            now = parameters(pair.model).values()
            sides = zip(now, pair.plain.parameters(), before, strict=True)
            for mine, plain, old in sides:
                # differences of values near 1 keep 1e-16 / 1e-7 of their digits
                torch.testing.assert_close(mine - old, plain - old, rtol=1e-7, atol=1e-15)
