"""Optimizer state of any shape, groups of any kind, and what ranks hold apart come back exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from tests.kit.checkpoints import Job, adamw_groups, train, whole_state
from tests.kit.models import CASES
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import assert_same_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class _Counting(torch.optim.Optimizer):
    """Keeps a counter of shape (1,), a moment, a plain number and nothing for some parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("count", torch.zeros(1)).add_(1)
                state.setdefault("moment", torch.zeros_like(parameter)).add_(parameter.grad)
                state["calls"] = state.get("calls", 0) + 1
                parameter.sub_(state["moment"] * group["lr"])
        return None


_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused-adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "tensor-lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2)),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "counting": lambda m: _Counting(m.parameters()),
}


def _shapes() -> nn.Module:
    """Sizes around every multiple of the world size, and all that are special."""
    model = nn.Module()
    for number, shape in enumerate(
        [(1,), (), (2,), (3,), (5,), (6,), (7,), (1, 4, 4), (0, 3), (3, 2, 2), (4, 3)]
    ):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))
    return model


def _step(model: nn.Module, optimizer: Any) -> None:
    loss = torch.zeros(())
    for parameter in model.parameters():
        loss = loss + parameter.square().sum()
    optimizer.backward(loss)


@pytest.mark.world_size(4, timeout_s=60)
@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_state_of_every_shape_survives_resharding(kind: str, tmp_path: Path) -> None:
    jobs = [
        Job(stage=2, size=size, build=_shapes, make_optimizer=_OPTIMIZERS[kind])
        for size in (4, 3, 2, 1)
    ]
    for saver in jobs:
        started = saver.start(seed=1)
        expected: list[Any] = [None]
        if started is not None:
            model, optimizer = started
            for _ in range(2):
                _step(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            expected = [whole_state(model, optimizer)]
            sw.save(tmp_path / "checkpoint", model, optimizer)
        dist.broadcast_object_list(expected, src=0)
        for loader in jobs:
            started = loader.start(seed=2)
            if started is not None:
                sw.load(tmp_path / "checkpoint", *started)
                actual = whole_state(*started)
                assert_bit_equal(actual["parameters"], expected[0]["parameters"])
                assert_same_state(actual["optimizer"], expected[0]["optimizer"])
            dist.barrier()


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_saving_and_loading_commute_before_the_first_step(stage: int, tmp_path: Path) -> None:
    job = Job(stage=stage)
    one, other = job.start(seed=1), job.start(seed=2)
    assert one is not None
    assert other is not None
    expected = whole_state(*one)
    sw.save(tmp_path / "a", *one)
    sw.save(tmp_path / "a", *one)
    sw.load(tmp_path / "a", *other)
    sw.load(tmp_path / "a", *other)
    sw.save(tmp_path / "b", *other)
    third = job.start(seed=3)
    assert third is not None
    sw.load(tmp_path / "b", *third)
    for state in (whole_state(*other), whole_state(*third)):
        assert_bit_equal(state["parameters"], expected["parameters"])
        assert_same_state(state["optimizer"], expected["optimizer"])


@pytest.mark.world_size(2, timeout_s=30)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_and_parameters_that_differ_between_ranks_stay_different(
    stage: int, tmp_path: Path
) -> None:
    def start(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = CASES["conv"].build()
        sw.shard(model, stage=stage, ignored=list(model.output.parameters()))
        return model, sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def own(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        values = dict(model.named_buffers()) | dict(model.output.named_parameters())
        moments = {
            f"{number}.{name}": value
            for number, parameter in enumerate(model.output.parameters())
            for name, value in optimizer.state[parameter].items()
        }
        return {name: value.detach().clone() for name, value in (values | moments).items()}

    model, optimizer = start(1)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        optimizer.backward(CASES["conv"].loss(model))
        optimizer.step()
        optimizer.zero_grad()
    expected = own(model, optimizer)
    of_both: list[Any] = [None, None]
    dist.all_gather_object(of_both, expected["norm.running_mean"])
    assert not torch.equal(*of_both)
    sw.save(tmp_path / "checkpoint", model, optimizer)
    resumed, its_optimizer = start(2)
    sw.load(tmp_path / "checkpoint", resumed, its_optimizer)
    assert_bit_equal(own(resumed, its_optimizer), expected)


@pytest.mark.world_size(1, 2, timeout_s=30)
def test_groups_are_found_by_the_names_of_their_members(tmp_path: Path) -> None:
    one = Job(stage=2).start(seed=1)
    assert one is not None
    one[1].param_groups[0].update(lr=0.5, custom=(1, None, "a"), betas=(0.5, 0.6))
    train(*one, 1)
    sw.save(tmp_path / "checkpoint", *one)

    def turned(model: nn.Module) -> torch.optim.Optimizer:
        first, second = adamw_groups(model).param_groups
        groups = [{"params": second["params"]}, {"params": first["params"]}]
        return torch.optim.AdamW(groups, lr=0.7)

    other = Job(stage=2, make_optimizer=turned).start(seed=2)
    assert other is not None
    sw.load(tmp_path / "checkpoint", *other)
    first, second = other[1].param_groups
    assert (first["lr"], second["lr"]) == (2e-3, 0.5)
    assert second["custom"] == (1, None, "a")
    assert second["betas"] == (0.5, 0.6)


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_alone_reach_the_masters(stage: int, tmp_path: Path) -> None:
    one = Job(stage=stage).start(seed=1)
    assert one is not None
    expected = whole_state(*one)
    sw.save(tmp_path / "checkpoint", one[0])
    precision = sw.MixedPrecision(param_dtype=torch.bfloat16)
    model, optimizer = Job(stage=stage, precision=precision).start(seed=2) or (None, None)
    assert model is not None
    assert optimizer is not None
    train(model, optimizer, 1)
    sw.load(tmp_path / "checkpoint", model)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, 1)
    actual = whole_state(model, optimizer)["parameters"]
    wanted = {n: v.to(actual[n].dtype) for n, v in expected["parameters"].items()}
    assert_bit_equal(actual, wanted)


class _Calls(torch.optim.Optimizer):
    """Keeps a number of calls that differs from rank to rank."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1 + dist.get_rank()
                state.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
        return None


@pytest.mark.world_size(3, timeout_s=30)
@pytest.mark.parametrize("users", [(0,), (1,), (2,), (1, 2), (0, 2), (0, 1, 2), ()], ids=str)
def test_what_ranks_hold_apart_is_had_again_by_those_that_had_it(
    users: tuple[int, ...], tmp_path: Path
) -> None:
    """State of a parameter left out of sharding that some ranks have used, numbers among it."""

    def start() -> tuple[nn.ModuleDict, Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 2)})
        sw.shard(model, stage=2, ignored=list(model["b"].parameters()))
        return model, sw.ShardedOptimizer(_Calls(model.parameters()))

    model, optimizer = start()
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    loss = model["a"](x).sum()
    if dist.get_rank() in users:
        loss = loss + model["b"](x).sum()
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    sw.save(tmp_path / "checkpoint", model, optimizer)
    resumed, its_optimizer = start()
    assert bool(optimizer.state.get(model["b"].weight)) is (dist.get_rank() in users)
    sw.load(tmp_path / "checkpoint", resumed, its_optimizer)
    expected = optimizer.state.get(model["b"].weight) or {}
    actual = its_optimizer.state.get(resumed["b"].weight) or {}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(actual[name]), torch.as_tensor(value))
    plain = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 2)})
    alone = _Calls(plain.parameters())
    sw.load(tmp_path / "checkpoint", plain, alone)
    assert bool(alone.state.get(plain["b"].weight)) is bool(expected)


@pytest.mark.world_size(2, timeout_s=30)
def test_saving_and_loading_in_inference_mode_leaves_tensors_that_train(tmp_path: Path) -> None:
    started = Job(stage=2).start(seed=1)
    assert started is not None
    train(*started, 1)
    with torch.inference_mode():
        sw.save(tmp_path / "checkpoint", *started)
    resumed = Job(stage=2).start(seed=2)
    assert resumed is not None
    with torch.inference_mode():
        sw.load(tmp_path / "checkpoint", *resumed)
    torch.manual_seed(3)
    train(*started, 2)
    torch.manual_seed(3)
    train(*resumed, 2)
    expected, actual = whole_state(*started), whole_state(*resumed)
    assert_bit_equal(actual["parameters"], expected["parameters"])
    assert_same_state(actual["optimizer"], expected["optimizer"])
