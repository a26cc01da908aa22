"""An exception in forward or backward: `zero_grad` makes the next step a fresh one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.compat.zero_ddp_kit import MODES, adamw, build, exact, is_at_rest
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


class Model(nn.Module):
    """Fails where it is told to, with some layers done and some not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.fails: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 2 and self.fails == "forward":
                raise RuntimeError("out of memory")
            x = torch.tanh(layer(x))
            if number == 1 and self.fails == "backward":
                x = Fail.apply(x)
        return x


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(3, 5)).float().square().mean()


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_step_after_a_broken_one_is_that_of_one_process(fails: str) -> None:
    options = OracleOptions(
        world_size=dist.get_world_size(), num_steps=2, param_dtype=torch.bfloat16
    )
    records = run_oracle(Model, adamw, loss_of, options)
    for mode in MODES:
        model, optimizer = build(Model, mixed_precision=torch.bfloat16, chunk_bytes=64, **mode)
        initial = exact(model)
        for step, record in enumerate(records):
            optimizer.backward(loss_of(model))  # a micro-batch before is forgotten with it
            model.module.fails = fails
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizer.backward(loss_of(model))
            model.module.fails = None
            before = records[step - 1].parameters if step else initial
            assert_bit_equal(exact(model), before, what="saved after the error")
            if step:
                model.zero_grad(set_to_none=True)
            else:
                optimizer.zero_grad()
            if "reshard_after_forward" not in mode:
                assert is_at_rest(model)
            seed(step=step, rank=dist.get_rank(), micro_batch=0)
            optimizer.backward(loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
            assert_bit_equal(exact(model), record.parameters, what=f"{mode}, step {step}")
