"""Frozen parameters and unused ones, in the chunks of others: they wait for nobody."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.compat.zero_ddp_kit import MODES, build, exact, gradients, is_at_rest
from tests.kit.models import OddMLP, TwoOutputs
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def partly_frozen() -> nn.Module:
    model = OddMLP()
    model.first.weight.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    return model


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(4, 123)).float().square().mean()


@pytest.mark.world_size(1, 2, 3)
def test_frozen_and_unused_parameters_stay_and_the_others_train(world_size: int) -> None:
    """A frozen 16-bit parameter has no master: it is what it was rounded to."""
    options = OracleOptions(world_size=world_size, param_dtype=torch.bfloat16)
    records = run_oracle(partly_frozen, adamw, loss_of, options)
    for mode in MODES:
        model, optimizer = build(partly_frozen, adamw, mixed_precision=torch.bfloat16, **mode)
        before = exact(model)
        for step, record in enumerate(records):
            seed(step=step, rank=dist.get_rank(), micro_batch=0)
            loss = loss_of(model)
            assert loss.item() == record.losses[dist.get_rank()][0]
            optimizer.backward(loss)
            assert_bit_equal(gradients(model), record.gradients)
            optimizer.step()
            assert is_at_rest(model)
            model.zero_grad(set_to_none=True)
            frozen = {n: v.bfloat16().float() for n, v in record.parameters.items()}
            is_frozen = {n: not p.requires_grad for n, p in model.named_parameters()}
            after = exact(model)
            expected = {n: (frozen if is_frozen[n] else record.parameters)[n] for n in after}
            assert_bit_equal(after, expected)
        for name in ("unused.weight", "unused.bias", "first.weight", "last.bias"):
            assert torch.equal(before[name], after[name]), name


@pytest.mark.world_size(2)
def test_what_one_rank_used_is_updated_with_the_mean() -> None:
    for mode in MODES:
        model, optimizer = build(TwoOutputs, mixed_precision=torch.bfloat16, **mode)
        left, right = model(torch.ones(1, 6))
        optimizer.backward((left if dist.get_rank() else right).float().sum())
        found = gradients(model)
        for name in ("left.bias", "right.bias"):
            gradient = found[name]
            assert gradient is not None
            assert torch.equal(gradient, torch.full_like(gradient, 0.5))


@pytest.mark.world_size(2)
def test_parameters_may_be_frozen_and_thawed_between_steps() -> None:
    for mode in MODES:
        model, optimizer = build(OddMLP, mixed_precision=torch.bfloat16, **mode)
        for frozen in ("first", "last", None):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(frozen is None or not name.startswith(frozen))
            before = exact(model)
            optimizer.backward(loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
            after = exact(model)
            for name in ("first.weight", "last.weight"):
                is_kept = torch.equal(before[name], after[name])
                assert is_kept is (frozen is not None and name.startswith(frozen)), (frozen, name)
