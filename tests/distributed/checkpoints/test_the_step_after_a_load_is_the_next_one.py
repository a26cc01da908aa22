"""Steps after a load are those of the run that went on: odd optimizers, frozen and own parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from tests.kit.checkpoints import whole_state
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import assert_same_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5, bias=False)
        self.second = nn.Linear(5, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


_MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "foreach": lambda m: torch.optim.Adam(m.parameters(), foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "muon": lambda m: torch.optim.Muon(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
}


def _start(
    kind: str, stage: int, seed: int, ignored: str | None = None
) -> tuple[nn.Module, sw.ShardedOptimizer]:
    torch.manual_seed(seed)
    model = _Net()
    left_out = [] if ignored is None else list(getattr(model, ignored).parameters())
    sw.shard(model, stage=stage, ignored=left_out)
    return model, sw.ShardedOptimizer(_MAKERS[kind](model))


def _train(model: nn.Module, optimizer: Any, num_steps: int) -> None:
    for number in range(num_steps):
        torch.manual_seed(100 + 10 * number + dist.get_rank())
        optimizer.backward(model(torch.randn(3, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    actual, expected = whole_state(*one), whole_state(*other)
    assert_bit_equal(actual["parameters"], expected["parameters"])
    assert_same_state(actual["optimizer"], expected["optimizer"])


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", _MAKERS)
def test_optimizers_go_on_and_ranks_agree(kind: str, stage: int, tmp_path: Path) -> None:
    """Owners of whole parameters among them: what they loaded reaches the other ranks."""
    started, resumed = _start(kind, stage, 1), _start(kind, stage, 2)
    _train(*started, 2)
    sw.save(tmp_path / "a", *started)
    sw.load(tmp_path / "a", *resumed)
    _assert_same(resumed, started)
    counters = [
        {n: (type(v), v.dtype, v.shape, v.device) for n, v in state.items() if n == "step"}
        for optimizer in (started[1], resumed[1])
        for state in optimizer.unwrap().state.values()
    ]
    half = len(counters) // 2
    assert counters[:half] == counters[half:]
    everywhere: list[Any] = [None] * dist.get_world_size()
    with sw.full_parameters(resumed[0]):
        mine = {n: p.detach().clone() for n, p in resumed[0].named_parameters()}
    dist.all_gather_object(everywhere, mine)
    for values in everywhere:
        assert_bit_equal(values, everywhere[0])
    for run in (started, resumed):
        _train(*run, 2)
    _assert_same(resumed, started)


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_of_a_parameter_frozen_since_is_there_when_it_trains_again(
    stage: int, tmp_path: Path
) -> None:
    started, resumed = _start("fused", stage, 1), _start("fused", stage, 2)
    _train(*started, 1)
    for model, _ in (started, resumed):
        model.first.requires_grad_(False)
    _train(*started, 1)
    sw.save(tmp_path / "a", *started)
    sw.load(tmp_path / "a", *resumed)
    _assert_same(resumed, started)
    for run in (started, resumed):
        run[0].first.requires_grad_(True)
        _train(*run, 2)
    _assert_same(resumed, started)


@pytest.mark.world_size(1, 2, timeout_s=30)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["fused", "momentum"])
def test_a_part_left_out_of_sharding_goes_on(kind: str, stage: int, tmp_path: Path) -> None:
    started = _start(kind, stage, 1, ignored="second")
    resumed = _start(kind, stage, 2, ignored="second")
    _train(*started, 2)
    sw.save(tmp_path / "a", *started)
    sw.load(tmp_path / "a", *resumed)
    for run in (started, resumed):
        _train(*run, 2)
    _assert_same(resumed, started)


@pytest.mark.world_size(1, 2, timeout_s=30)
def test_a_schedule_can_be_built_anew_from_the_loaded_groups(tmp_path: Path) -> None:
    """It asks for ``initial_lr``, which another schedule has left in the groups."""

    def decay(epoch: int) -> float:
        return 0.5**epoch

    started, resumed = _start("fused", 2, 1), _start("fused", 2, 2)
    schedule = LambdaLR(started[1], decay)
    for _ in range(3):
        _train(*started, 1)
        schedule.step()
    sw.save(tmp_path / "a", *started)
    resumed[1].param_groups[0]["lr"] = 0.7
    sw.load(tmp_path / "a", *resumed)
    assert resumed[1].param_groups[0]["lr"] == 1e-2 * 0.5**3
    anew = LambdaLR(resumed[1], decay, last_epoch=2)
    for run, own in ((started, schedule), (resumed, anew)):
        for _ in range(2):
            _train(*run, 1)
            own.step()
    _assert_same(resumed, started)
