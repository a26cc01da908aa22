"""`ColoDDP`: whole mean gradients on every rank, for any plain optimizer on top."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.compat.colossalai import ColoDDP
from shardwise.errors import ConfigurationError, ShardwiseError
from tests.distributed.compat.kit import loss_of, values
from tests.kit.models import CASES, OddMLP, TwoOutputs
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that knows nothing of ranks."""
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients as they lie in the parameters."""
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.world_size(1, 2, 3)
@pytest.mark.parametrize("bucket_cap_mb", [0.01, 25])
def test_a_plain_optimizer_on_top_trains_like_one_process(world_size: int, bucket_cap_mb: float):
    """With a layer that no rank uses, on the CPU: no crash, and the mean rather than the sum."""
    options = OracleOptions(world_size=world_size, num_steps=2, num_micro_batches=2)
    for name in ("mlp", "gpt", "conv", "lstm"):
        case = CASES[name]
        records = run_oracle(case.build, adamw, case.loss, options)
        torch.manual_seed(0)
        model = ColoDDP(case.build(), bucket_cap_mb=bucket_cap_mb)
        optimizer = adamw(model)
        for step, record in enumerate(records):
            for micro_batch in range(2):
                seed(step=step, rank=dist.get_rank(), micro_batch=micro_batch)
                loss = case.loss(model)
                model.backward(loss)
                assert loss.item() == record.losses[dist.get_rank()][micro_batch]
            assert_bit_equal(grads(model), record.gradients, what=f"{name}, step {step}")
            optimizer.step()
            assert_bit_equal(values(model), record.parameters, what=f"{name}, step {step}")
            model.zero_grad(set_to_none=True)


@pytest.mark.world_size(2)
def test_gradients_add_up_until_they_are_zeroed():
    """Zeroed or removed, by the module or by the optimizer: the next sum starts from nothing."""
    model = ColoDDP(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    bias = model.module.get_parameter("bias")

    def run() -> None:
        model.backward(model(torch.ones(1, 3)).sum() * (1 + dist.get_rank()))

    clearings = (
        lambda: model.zero_grad(),
        lambda: model.zero_grad(set_to_none=False),
        lambda: model.zero_grad(set_to_none=True),
        lambda: optimizer.zero_grad(set_to_none=True),
        lambda: optimizer.zero_grad(set_to_none=False),
    )
    for number, clear in enumerate(clearings):
        for times in (1, 2, 3):
            run()
            assert bias.grad is not None, number
            assert torch.equal(bias.grad, torch.full((2,), 1.5 * times)), (number, times)
        clear()
        assert bias.grad is None or not bias.grad.any()
    run()
    bias.grad = torch.full((2,), 4.0)  # what clipping or a user wrote is what is added to
    run()
    assert torch.equal(bias.grad, torch.full((2,), 5.5))


@pytest.mark.world_size(2)
def test_unused_and_frozen_parameters_have_no_gradient():
    """Asking a parameter without gradient where its gradient lies would crash."""
    model = ColoDDP(OddMLP())
    model.module.get_submodule("last").requires_grad_(False)
    model.backward(loss_of(model))
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) is name.startswith("first"), name


@pytest.mark.world_size(2)
def test_a_parameter_that_one_rank_used_has_the_mean_everywhere():
    model = ColoDDP(TwoOutputs())
    left, right = model(torch.ones(1, 6))
    model.backward((left if dist.get_rank() else right).sum())
    for name in ("left.bias", "right.bias"):
        gradient = model.module.get_parameter(name).grad
        assert gradient is not None
        assert torch.equal(gradient, torch.full_like(gradient, 0.5))


@pytest.mark.world_size(2)
def test_ignored_parameters_keep_local_gradients_and_values():
    torch.manual_seed(dist.get_rank())
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    own = inner[0].get_parameter("weight").detach().clone()
    ColoDDP.set_params_to_ignore(inner[0].parameters())
    model = ColoDDP(inner)
    assert torch.equal(inner[0].get_parameter("weight"), own)
    model.backward(model(torch.full((1, 3), 1.0 + dist.get_rank())).square().sum())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        everyone = [torch.empty_like(parameter.grad) for _ in range(2)]
        dist.all_gather(everyone, parameter.grad.contiguous())
        assert torch.equal(everyone[0], everyone[1]) is name.startswith("1"), name
    with pytest.raises(ConfigurationError, match="before"):
        ColoDDP.set_params_to_ignore(inner[1].parameters())
    for set_to_none in (False, True):
        model.zero_grad(set_to_none=set_to_none)
        assert all(p.grad is None or not p.grad.any() for p in inner.parameters())


@pytest.mark.world_size(1, 2)
def test_names_and_modes_are_those_of_the_inner_module():
    torch.manual_seed(0)
    case = CASES["conv"]
    plain = case.build()
    inner = case.build()
    inner.load_state_dict(plain.state_dict())
    model = ColoDDP(inner)
    assert_bit_equal(model.state_dict(), plain.state_dict())
    for named in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        mine = [name for name, _ in getattr(model, named)()]
        assert mine == [name for name, _ in getattr(plain, named)()], named
    assert list(model.parameters()) == list(inner.parameters())
    torch.manual_seed(1)
    other = case.build()
    model.load_state_dict(other.state_dict())
    assert_bit_equal(inner.state_dict(), other.state_dict())
    for is_training in (False, True):
        assert model.train(is_training) is model
        assert {part.training for part in (model, *inner.modules())} == {is_training}
    seen: list[nn.Module] = []
    model.apply(seen.append)
    assert inner in seen
    with pytest.raises(ConfigurationError):
        ColoDDP(inner)


@pytest.mark.world_size(2)
def test_the_first_rank_decides_where_training_starts():
    """Seeds may differ over ranks: without a broadcast each would train a model of its own."""
    torch.manual_seed(dist.get_rank())
    model = ColoDDP(CASES["conv"].build())
    for name, value in model.state_dict().items():
        expected = value.clone()
        dist.broadcast(expected, 0)
        assert torch.equal(value, expected), name


@pytest.mark.world_size(2)
def test_a_plain_backward_call_is_refused_by_the_next_use_of_its_gradients():
    model = ColoDDP(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = values(model)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ShardwiseError):
        optimizer.step()
    assert_bit_equal(values(model), before)
    model.zero_grad()
    model.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    bias = model.module.get_parameter("bias")
    assert torch.equal(bias, before["bias"] - 1.0)


@pytest.mark.world_size(2)
def test_a_broken_pass_is_forgotten_by_zero_grad():
    for set_to_none in (False, True):
        torch.manual_seed(0)
        model = ColoDDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
        calls: list[int] = []

        def fail(_: Tensor, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise ValueError("once")

        def hook(module: nn.Module, args: object, output: Tensor, fail=fail) -> None:
            output.register_hook(fail)

        model.module.get_submodule("0").register_forward_hook(hook)
        with pytest.raises(ValueError, match="once"):
            model.backward(model(torch.ones(1, 3)).sum())
        model.zero_grad(set_to_none=set_to_none)
        model.backward(model(torch.ones(1, 3)).sum() * (1 + dist.get_rank()))
        bias = model.module.get_parameter("1.bias")
        assert bias.grad is not None
        assert torch.equal(bias.grad, torch.full((2,), 1.5))
