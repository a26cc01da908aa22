"""Ways in which sharded optimizers have been wrong before, each as the property that it broke."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.kit.faces import Face, for_each_cell, wrap
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed

BOTH = pytest.mark.parametrize("stage", [1, 2], ids=["stage1", "stage2"])

sgd = partial(torch.optim.SGD, lr=1.0)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copy the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.world_size(2)
@for_each_cell
def test_gradients_that_scaling_saved_are_unscaled_in_float32(face: Face, stage: int):
    """Divided by the scale in 16 bits, before the cast, a true gradient of 1e-8 is zero again."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = wrap(face, model, sgd, stage=stage, param_dtype=torch.float16)
    optimizer.backward(model(torch.ones(1, 4, dtype=torch.float16)).float().sum() * 1e-8)
    optimizer.step()
    (master,) = optimizer.state_dict()["shardwise"]["masters"].values()
    torch.testing.assert_close(master, torch.full((1, 4), -1e-8), rtol=1e-3, atol=0)


@pytest.mark.world_size(2)
@for_each_cell
def test_gradients_are_divided_by_the_scale_that_they_have(face: Face, stage: int):
    """A scaler that is updated before its scale is read halves the gradients of growing steps."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = wrap(
        face, model, sgd, stage=stage, param_dtype=torch.float16, clip_grad_norm=1.0,
        initial_scale=8.0, growth_interval=1,
    )  # fmt: skip
    for number in range(1, 4):
        x = torch.full((1, 4), 0.25, dtype=torch.float16)
        optimizer.backward(model(x).float().sum())
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.loss_scale == 8.0 * 2**number
        assert torch.equal(model.weight, torch.full_like(model.weight, 1 - 0.25 * number))


@pytest.mark.world_size(2)
@for_each_cell
def test_cleared_gradients_are_applied_by_no_step(face: Face, stage: int):
    """Clearing `.grad` but not what was reduced already applies the discarded pass all the same."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = wrap(face, model, sgd, stage=stage)
    optimizer.backward(model(torch.full((1, 4), 8.0)).sum())
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.weight, torch.zeros(1, 4))
    optimizer.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    assert torch.equal(model.weight, torch.full((1, 4), -1.0))


class CountingSGD(torch.optim.Optimizer):
    """Keeps state in its groups and looks at all its gradients together."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"step": 0, "num_seen": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            group["num_seen"] = sum(p.grad is not None for p in group["params"])
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / group["step"])


@pytest.mark.world_size(2)
@for_each_cell
def test_the_inner_optimizer_is_called_once_a_step(face: Face, stage: int):
    """Called once per parameter, counters of a group run away and hooks fire again and again."""
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    optimizer = wrap(face, model, CountingSGD, stage=stage, chunk_numel=1700)
    for step in range(1, 4):
        optimizer.backward(model(torch.ones(1, 40)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["step"] == step
    assert optimizer.param_groups[0]["num_seen"] == len(optimizer.param_groups[0]["params"])
    calls: list[int] = []
    plain = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    adam = wrap(face, plain, torch.optim.Adam, stage=stage, chunk_numel=1700)
    adam.unwrap().register_step_post_hook(lambda *_: calls.append(1))
    adam.backward(plain(torch.ones(1, 40)).sum())
    adam.step()
    assert len(calls) == 1


class Choice(nn.Module):
    """Two branches, of equal or unequal shape; and one that nobody takes."""

    def __init__(self, right: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, right)
        self.never = nn.Linear(5, 3)

    def forward(self, x: Tensor, *, goes_left: bool) -> Tensor:
        return self.left(x) if goes_left else self.right(x)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("right", [3, 7], ids=["equal shapes", "unequal shapes"])
@for_each_cell
def test_ranks_may_use_different_parameters(world_size: int, face: Face, stage: int, right: int):
    """Buckets that each rank fills by itself add gradients of different parameters, or hang."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Choice(right)
    before = values(model)
    optimizer = wrap(face, model, partial(torch.optim.SGD, lr=0.0), stage=stage)
    x = torch.ones(1, 5)
    optimizer.backward(model(x, goes_left=rank == 0).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert_bit_equal(values(model), before)  # a step of length zero moves nothing
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.backward(model(x, goes_left=rank == 0).sum())
    optimizer.step()
    after = values(model)
    for name in ("weight", "bias"):
        left, right_share = (
            torch.tensor(1.0) / world_size,
            torch.tensor(world_size - 1.0) / world_size,
        )
        assert torch.equal(after[f"left.{name}"], before[f"left.{name}"] - left)
        assert torch.equal(after[f"right.{name}"], before[f"right.{name}"] - right_share)
        assert torch.equal(after[f"never.{name}"], before[f"never.{name}"])


@pytest.mark.world_size(2)
@for_each_cell
def test_no_gradients_at_all_are_no_error(face: Face, stage: int):
    """A group that is frozen, a step before any pass, and one after an overflow."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    groups = [{"params": part.parameters()} for part in model]
    optimizer = wrap(face, model, lambda _: torch.optim.SGD(groups, lr=1.0), stage=stage)
    before = values(model)
    optimizer.step()
    optimizer.backward(model(torch.full((1, 4), float("inf"))).sum())
    optimizer.step()
    assert_bit_equal(values(model), before)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    changed = {n for n, v in values(model).items() if not torch.equal(v, before[n])}
    assert changed == {"1.weight", "1.bias"}


@pytest.mark.world_size(2)
@for_each_cell
def test_local_gradients_of_other_parameters_survive_a_synchronised_pass(face: Face, stage: int):
    """Clearing every `.grad` at the end of a pass drops what no_sync had gathered elsewhere."""
    model = Choice(3)
    optimizer = wrap(face, model, sgd, stage=stage)
    before = values(model)
    x = torch.full((1, 5), 1.0 + dist.get_rank())
    with optimizer.no_sync():
        optimizer.backward(model(x, goes_left=True).sum())
    optimizer.backward(model(x, goes_left=False).sum())
    optimizer.step()
    for branch in ("left", "right"):
        expected = before[f"{branch}.weight"] - 1.5
        assert torch.equal(model.get_parameter(f"{branch}.weight"), expected), branch


class Recomputed(nn.Module):
    """One layer in two segments that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True)
            x = self.own(x)
        return x


class Strided(nn.Module):
    """Weights that are not contiguous: transposed and channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(6, 75).t())
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        return F.linear(self.conv(x).mean(1, keepdim=True).expand(-1, 3, -1, -1).flatten(1), self.transposed.t())  # fmt: skip  # noqa: E501


def loss_over(model: nn.Module, width: int) -> Tensor:
    """The mean square over random inputs."""
    return model(torch.randn(3, width)).square().mean()


@pytest.mark.world_size(2, 3)
@for_each_cell
def test_recomputed_shared_and_strided_parameters_train_as_in_one_process(
    world_size: int, face: Face, stage: int
):
    """Hooks that fire twice for one parameter, and weights without a flat view, both crashed."""
    for build, width in ((Recomputed, 6), (Strided, 75)):
        adam = partial(torch.optim.Adam, lr=0.1)
        loss = partial(loss_over, width=width)
        records = run_oracle(
            build,
            lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
            loss,
            OracleOptions(world_size=world_size, num_steps=2),
        )
        torch.manual_seed(0)
        model = build()
        strides = [p.stride() for p in model.parameters()]
        optimizer = wrap(face, model, adam, stage=stage)
        for step, record in enumerate(records):
            seed(step=step, rank=dist.get_rank(), micro_batch=0)
            optimizer.backward(loss(model))
            optimizer.step()
            optimizer.zero_grad()
            if build is Strided:
                assert_bit_equal(values(model), record.parameters)
            else:  # passes over one layer may be added in another order
                for name, value in values(model).items():
                    torch.testing.assert_close(value, record.parameters[name], rtol=1e-5, atol=1e-6)
        assert [p.stride() for p in model.parameters()] == strides


@pytest.mark.world_size(2)
@for_each_cell
def test_a_bad_batch_leaves_every_dtype_as_it_was(face: Face, stage: int):
    """Clipping by an infinite norm multiplies infinity by zero: NaN in the masters for good."""
    for dtype in (torch.bfloat16, torch.float32):
        model = nn.Linear(4, 2).to(dtype)
        optimizer = wrap(face, model, sgd, stage=stage, param_dtype=dtype, clip_grad_norm=1.0)
        before = values(model)
        x = torch.ones(1, 4, dtype=dtype) * (float("inf") if dist.get_rank() == 1 else 1.0)
        optimizer.backward(model(x).sum())
        optimizer.step()
        assert_bit_equal(values(model), before, what=str(dtype))


@pytest.mark.world_size(3)
@BOTH
def test_the_largest_gradient_counts_once_over_groups_and_empty_ranks(stage: int):
    """Groups of an infinity norm combine by their largest; ranks without gradients take part."""
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[1].weight)
    groups = [{"params": part.parameters()} for part in model]
    optimizer = sw.ShardedOptimizer(
        torch.optim.SGD(groups, lr=1.0), stage=stage, norm_type=float("inf"), clip_grad_norm=1.0
    )
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    optimizer.refresh_master_parameters()
    # slopes of the first weight: its inputs; of the second: the sum of those
    optimizer.backward(model(torch.tensor([[3.0, 1.0, 1.0]])).sum())
    optimizer.step()
    assert optimizer.grad_norm == 5.0
    torch.testing.assert_close(model[1].weight.detach(), torch.zeros(1, 1), atol=1e-5, rtol=0)


@pytest.mark.world_size(4)
@BOTH
def test_meshes_that_step_at_different_times_do_not_wait_for_each_other(stage: int):
    """An overflow flag over the whole world would make one group wait for a step of the other."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = dist.get_rank() // 2
    pair = pairs[number]
    assert isinstance(pair, dist.ProcessGroup)
    model = nn.Linear(4, 1, bias=False)
    optimizer = sw.ShardedOptimizer(
        sgd(list(model.parameters())), stage=stage, mesh=DeviceMesh.from_group(pair, "cpu")
    )
    before = values(model)["weight"]
    for _ in range(1 + 2 * number):
        optimizer.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(1 + 2 * number):
        before -= 1.0
    assert torch.equal(model.weight, before)


@pytest.mark.world_size(3)
@for_each_cell
def test_ranks_that_start_apart_train_the_first_ranks_model(face: Face, stage: int):
    """Without a broadcast, shards of different initialisations are stitched into one model."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(50, 3)
    optimizer = wrap(face, model, sgd, stage=stage, param_dtype=torch.bfloat16)
    torch.manual_seed(0)
    first = nn.Linear(50, 3).bfloat16()
    assert_bit_equal(values(model), values(first))
    masters = optimizer.state_dict()["shardwise"]["masters"]
    assert torch.equal(masters[0].bfloat16(), first.weight)
