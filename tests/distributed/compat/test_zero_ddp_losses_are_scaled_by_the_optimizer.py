"""float16: the optimizer's `backward` scales, its step unscales; the module's own cannot."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.compat.colossalai import ZeroDDP
from shardwise.errors import ShardwiseError
from tests.distributed.compat.zero_ddp_kit import (
    MODES,
    build,
    exact,
    gradients,
    is_at_rest,
    sgd,
)
from tests.kit.oracle import assert_bit_equal


@pytest.mark.world_size(1, 2)
def test_gradients_below_float16_reach_the_values_behind_the_parameters(world_size: int) -> None:
    """float16 has nothing between 0 and 2**-24; the first loss is scaled already."""
    for mode in MODES:
        model, optimizer = build(lambda: nn.Linear(3, 2), sgd, loss_scale=None, **mode)
        model.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
        optimizer.backward(model(torch.ones(1, 3)).float().sum() * 2.0**-26)
        optimizer.step()
        assert not optimizer.last_step_skipped
        assert torch.equal(exact(model)["weight"], torch.full((2, 3), -(2.0**-26))), mode


@pytest.mark.world_size(2)
def test_an_unscaled_pass_of_a_float16_model_is_refused_beside_an_optimizer() -> None:
    for mode in MODES:
        model, optimizer = build(lambda: nn.Linear(3, 2), **mode)
        x = torch.ones(1, 3)
        before = exact(model)
        with pytest.raises(ShardwiseError, match=r"call optimizer\.backward\."):
            model.backward(model(x).float().sum())
        with pytest.raises(ShardwiseError, match=r"call optimizer\.backward_by_grad"):
            model.backward_by_grad(model(x), torch.ones(1, 2, dtype=torch.float16))
        assert set(gradients(model).values()) == {None}
        model.zero_grad(set_to_none=True)
        optimizer.backward(model(x).float().sum())
        optimizer.step()
        assert not torch.equal(exact(model)["weight"], before["weight"])


@pytest.mark.world_size(2)
def test_weighted_passes_are_not_mixed_with_others() -> None:
    model, optimizer = build(lambda: nn.Linear(3, 2), mixed_precision=torch.bfloat16)
    optimizer.backward(model(torch.ones(1, 3)).float().sum(), weight=2.0)
    with pytest.raises(ShardwiseError, match="weighted"):
        model.backward(model(torch.ones(1, 3)).float().sum())
    optimizer.zero_grad()
    model.backward(model(torch.ones(1, 3)).float().sum())


@pytest.mark.world_size(2)
def test_without_an_optimizer_a_float16_model_has_its_plain_gradients() -> None:
    torch.manual_seed(0)
    model = ZeroDDP(nn.Linear(3, 2))
    model.backward(model(torch.ones(1, 3)).sum() * (1 + dist.get_rank()))
    expected = torch.full((2, 3), 1.5, dtype=torch.float16)
    found = gradients(model)
    assert_bit_equal(found, {"weight": expected, "bias": expected[:, 0]})


@pytest.mark.world_size(2)
def test_an_overflow_on_one_rank_skips_the_step_and_keeps_every_bit() -> None:
    model, optimizer = build(lambda: nn.Linear(3, 2), loss_scale=sw.LossScale(hysteresis=1))
    before = exact(model)
    factor = float("inf") if dist.get_rank() else 1.0
    optimizer.backward(model(torch.ones(1, 3)).float().sum() * factor)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.loss_scale == 2.0**15
    assert_bit_equal(exact(model), before)
    assert is_at_rest(model)
    optimizer.backward(model(torch.ones(1, 3)).float().sum() / 16)
    optimizer.step()
    assert not optimizer.last_step_skipped
