"""Which gradients a step applies: all that were asked for, each once, and none that was dropped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.compat.colossalai import LowLevelZeroOptimizer
from shardwise.errors import ConfigurationError, ShardwiseError
from tests.distributed.compat.kit import adam, backward, build, gradients, loss_of, sgd, values
from tests.kit.models import TwoOutputs
from tests.kit.oracle import assert_bit_equal, seed

STAGES = pytest.mark.parametrize("partition_grad", [False, True], ids=["stage1", "stage2"])


@pytest.mark.world_size(2)
@STAGES
def test_zero_grad_discards_gradients_that_were_reduced(partition_grad: bool):
    """A cleared micro-batch that lives on in the sharded store would be applied all the same."""
    expected, optimizer = build(sgd, partition_grad=partition_grad)
    backward(expected, optimizer)
    optimizer.step()
    for set_to_none in (True, False):
        model, optimizer = build(sgd, partition_grad=partition_grad)
        backward(model, optimizer, micro_batch=1)
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, optimizer)
        optimizer.step()
        assert_bit_equal(values(model), values(expected), what=f"{set_to_none=}")


@pytest.mark.world_size(2)
@STAGES
def test_a_step_uses_its_gradients_up(partition_grad: bool):
    """Scripts of this signature need no zero_grad between steps."""
    model, optimizer = build(sgd, partition_grad=partition_grad)
    other, cleared = build(sgd, partition_grad=partition_grad)
    for step in range(3):
        backward(model, optimizer, step=step)
        optimizer.step()
        assert all(g is None for g in gradients(model, optimizer).values())
        cleared.zero_grad()
        backward(other, cleared, step=step)
        cleared.step()
        cleared.zero_grad()
    assert_bit_equal(values(model), values(other))


@pytest.mark.world_size(2)
@STAGES
def test_passes_under_no_sync_stay_on_their_rank(partition_grad: bool):
    """`.grad` is the plain local gradient, and `step` inside does nothing and says nothing."""
    for communication_dtype in (None, torch.float64):
        model, optimizer = build(
            sgd, partition_grad=partition_grad, communication_dtype=communication_dtype
        )
        plain, _ = build(sgd)
        before = values(model)
        assert optimizer.require_grad_sync
        with optimizer.no_sync():
            with optimizer.no_sync():
                backward(model, optimizer)
            assert not optimizer.require_grad_sync
            assert optimizer.step() is None
            assert_bit_equal(values(model), before)
            seed(step=0, rank=dist.get_rank(), micro_batch=0)
            names = [name for name, _ in plain.named_parameters()]
            expected = torch.autograd.grad(
                loss_of(plain), list(plain.parameters()), allow_unused=True
            )
            local = {name: p.grad for name, p in model.named_parameters()}
            assert_bit_equal(local, dict(zip(names, expected, strict=True)))
        assert optimizer.require_grad_sync
        optimizer.step()
        assert not torch.equal(values(model)["last.weight"], before["last.weight"])
        everywhere = values(model)["last.weight"]
        dist.broadcast(everywhere, 0)
        assert torch.equal(everywhere, values(model)["last.weight"])


@pytest.mark.world_size(2)
@STAGES
def test_a_local_gradient_survives_a_synchronised_pass_that_does_not_touch_it(partition_grad: bool):
    """Clearing `.grad` of all parameters after a pass would throw such a gradient away."""
    torch.manual_seed(0)
    model = TwoOutputs()
    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        partition_grad=partition_grad,
        overlap_communication=True,
    )
    x = torch.full((2, 6), 1.0 + dist.get_rank())
    with optimizer.no_sync():
        optimizer.backward(model(x)[0].sum())
    kept = model.left.weight.grad
    assert kept is not None
    total = kept.clone()
    dist.all_reduce(total)
    optimizer.backward(model(x)[1].sum())
    actual = optimizer.get_param_grad(model.left.weight)
    assert actual is not None
    assert torch.equal(actual, total / 2)
    assert optimizer.get_param_grad(model.right.weight) is not None


@pytest.mark.world_size(2)
@STAGES
def test_an_upstream_gradient_counts_as_scaled_already(partition_grad: bool):
    """From a gradient, or from the loss with that gradient and the same scale: the same bits."""
    scale = 2.0**10
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        factor = scale if dtype is torch.float16 else 1.0
        results = []
        for by_grad in (True, False):
            model, optimizer = build(
                sgd, partition_grad=partition_grad, forced_dtype=dtype, initial_scale=scale
            )
            seed(step=0, rank=dist.get_rank(), micro_batch=0)
            output = model(torch.randn(4, 123).to(dtype))
            upstream = torch.randn(4, 512).to(dtype) / 64
            if by_grad:
                optimizer.backward_by_grad(output, upstream * factor)
            else:
                optimizer.backward((output * upstream).sum(dtype=torch.float32))
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            results.append(values(model))
        assert_bit_equal(results[0], results[1], what=str(dtype))


@pytest.mark.world_size(2)
@STAGES
def test_clipping_by_hand_acts_on_the_reduced_gradients(partition_grad: bool):
    """Clipping what the inner optimizer shows between steps would clip nothing."""
    model, optimizer = build(sgd, partition_grad=partition_grad)
    backward(model, optimizer)
    plain, _ = build(sgd)
    for name, gradient in gradients(model, optimizer).items():
        plain.get_parameter(name).grad = gradient
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    norm = optimizer.clip_grad_by_norm(0.01)
    assert expected > 0.02
    torch.testing.assert_close(norm, expected)
    check_close(gradients(model, optimizer), plain)
    limit = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None) / 2
    nn.utils.clip_grad_value_(plain.parameters(), limit)
    optimizer.clip_grad_by_value(limit)
    check_close(gradients(model, optimizer), plain)
    before = values(model)
    optimizer.step()
    for name, value in values(model).items():
        gradient = plain.get_parameter(name).grad
        wanted = before[name] if gradient is None else before[name] - gradient
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-7)


def check_close(actual: dict[str, Tensor | None], plain: nn.Module) -> None:
    """Compare gradients up to the rounding of the clip coefficient."""
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, rtol=1e-6, atol=0)


@pytest.mark.world_size(2)
def test_value_clipping_knows_the_loss_scale_and_hides_no_overflow():
    parameter = nn.Parameter(torch.zeros(6, dtype=torch.float16))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([parameter], lr=1.0), initial_scale=2.0**10)
    slopes = torch.tensor([0.5, -0.5, 2.0, -2.0, 8.0, 0.0], dtype=torch.float16)
    optimizer.backward((parameter * slopes).float().sum())
    optimizer.clip_grad_by_value(1.0)
    clipped = optimizer.get_param_grad(parameter)
    assert clipped is not None
    assert torch.equal(clipped, slopes.float().clamp(-1, 1))
    optimizer.step()
    assert torch.equal(parameter, -slopes.clamp(-1, 1))
    optimizer.backward((parameter * float("inf")).float().sum())
    optimizer.clip_grad_by_value(1.0)
    before = parameter.detach().clone()
    optimizer.step()
    assert torch.equal(parameter, before)


@pytest.mark.world_size(2)
def test_errors_come_on_all_ranks_before_anything_changes():
    model, optimizer = build(adam)
    backward(model, optimizer)
    before = values(model), gradients(model, optimizer)
    for call in (
        lambda: optimizer.clip_grad_by_value(-1.0),
        lambda: optimizer.clip_grad_by_norm(0.0),
        lambda: optimizer.get_grad_norm(1.0),
        lambda: optimizer.get_param_grad(nn.Parameter(torch.ones(1))),
        lambda: list(optimizer.state_dict_shard(0)),
    ):
        with pytest.raises(ConfigurationError):
            call()
    for call in (lambda: optimizer.scale_loss(torch.ones(())), optimizer.unscale_grad):
        with pytest.raises(ShardwiseError, match="backward"):
            call()
    assert_bit_equal(values(model), before[0])
    assert_bit_equal(gradients(model, optimizer), before[1])
    bad = torch.nn.Parameter(torch.ones(3))
    guarded = LowLevelZeroOptimizer(torch.optim.SGD([bad], lr=1.0))
    guarded.backward((bad * (float("nan") if dist.get_rank() else 1.0)).sum())
    with pytest.raises(ShardwiseError, match="finite"):
        guarded.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    guarded.step()
    assert torch.equal(bad, torch.ones(3))
