"""Forward passes without gradients: before the first step, in the middle of one, and after."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.compat.zero_ddp_kit import MODES, adamw, build, exact, is_at_rest
from tests.kit.models import CASES, Case
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed


def plain(case: Case, parameters: dict[str, Tensor]) -> nn.Module:
    """Return the model with values rounded to bfloat16."""
    torch.manual_seed(0)
    model = case.build()
    model.load_state_dict({n: v.detach() for n, v in parameters.items()}, strict=False)
    return model.to(torch.bfloat16)


def evaluate(model: nn.Module, case: Case) -> Tensor:
    seed(step=77, rank=0, micro_batch=0)
    with torch.no_grad():
        return case.loss(model)


@pytest.mark.world_size(1, 2)
def test_evaluation_sees_the_newest_weights_and_changes_nothing(world_size: int) -> None:
    """Between backward and step too: gradients are not held where the weights are."""
    case = CASES["gpt"]
    options = OracleOptions(world_size=world_size, num_steps=2, param_dtype=torch.bfloat16)
    records = run_oracle(case.build, adamw, case.loss, options)
    for mode in MODES:
        model, optimizer = build(case.build, mixed_precision=torch.bfloat16, **mode)
        parameters = exact(model)
        for step, record in enumerate(records):
            expected = evaluate(plain(case, parameters), case)
            for is_training in (False, True):
                model.train(is_training)
                assert torch.equal(evaluate(model, case), expected), (mode, step)
            assert is_at_rest(model) or "reshard_after_forward" in mode
            seed(step=step, rank=dist.get_rank(), micro_batch=0)
            loss = case.loss(model)
            assert torch.equal(evaluate(model, case), expected), (mode, step)
            optimizer.backward(loss)
            assert torch.equal(evaluate(model, case), expected), (mode, step)
            optimizer.step()
            optimizer.zero_grad()
            parameters = record.parameters
            assert_bit_equal(exact(model), parameters, what=f"{mode}, step {step}")
        assert torch.equal(evaluate(model, case), evaluate(plain(case, parameters), case)), mode
