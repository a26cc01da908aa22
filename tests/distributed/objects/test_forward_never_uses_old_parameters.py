"""In whatever order forward uses parameters, it sees this step's values, however late they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from shardwise.runtime import publisher
from shardwise.runtime.collectives import Channel, Waitable, slice_of, wait_all
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import FACES, Face, Pair, Setting, parameters, stages_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.runtime.topology import Axis


class _LateGather:
    """Writes what was gathered only when it is waited for; until then there is NaN."""

    def __init__(self, buffer_C: Tensor, axis: Axis, channel: Channel, **options: int) -> None:
        self._target = buffer_C
        self._scratch = buffer_C.clone()
        self._works: Sequence[Waitable] = _start(self._scratch, axis, channel, **options)
        for peer in axis.peers:
            slice_of(buffer_C, peer, axis.size).fill_(torch.nan)

    def wait(self) -> None:
        wait_all(self._works)
        self._target.copy_(self._scratch)


_start = publisher.start_all_gather


def _start_late(buffer_C: Tensor, axis: Axis, channel: Channel, **options: int) -> list[Waitable]:
    if axis.group is None or buffer_C.numel() == 0:
        return []
    return [_LateGather(buffer_C, axis, channel, **options)]


class _Model(nn.Module):
    """Registered A, B, C and called in any order, one of them through a custom method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(5))
        self.order = "acb"

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            layer = getattr(self, name)
            x = torch.tanh(nn.functional.linear(x, layer.weight, bias=layer.bias))
        return x * self.scale

    def read(self, x: Tensor) -> Tensor:
        return (self.c.weight @ x) * self.scale


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.randn(3, 5)).square().mean()


@pytest.mark.world_size(2, 3, timeout_s=20)
@pytest.mark.parametrize("bare", [False, True], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("face", FACES)
def test_forward_never_uses_old_parameters(face: Face, bare: bool) -> None:
    publisher.start_all_gather = _start_late  # a rank is a process of its own
    for stage in stages_of(face):
        setting = Setting(stage=stage, face=face, shard={"chunk_bytes": 64})
        pair = Pair(_Model, setting=setting)
        for order in ("acb", "bca", "cab", "c", "abc"):
            pair.both(lambda model, order=order: setattr(model, "order", order))
            pair.backward(_loss, bare=bare)
            pair.check_gradients()
            pair.step()


_READS = {
    "custom method": lambda model: model.read(torch.ones(5)),
    "eval": lambda model: model.eval()(torch.ones(2, 5)),
    "detach": lambda model: model.c.weight.detach().clone(),
    "data": lambda model: model.c.weight.data.clone(),
    "item": lambda model: torch.tensor(model.scale[2].item()),
    "tolist": lambda model: torch.tensor(model.scale.tolist()),
    "numpy": lambda model: torch.tensor(model.scale.detach().numpy().copy()),
    "state_dict": lambda model: model.state_dict()["c.weight"].clone(),
    "copy_": lambda model: torch.empty(5, 5).copy_(model.c.weight),
    "stack": lambda model: torch.stack([model.a.bias, model.b.bias]),
    "out": lambda model: torch.add(model.a.bias, model.b.bias),
    "foreach": lambda model: torch._foreach_mul(list(model.parameters()), 2.0)[0],
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "norm": lambda model: torch.linalg.vector_norm(model.c.weight),
    "repr": lambda model: torch.tensor(float("nan" in repr(model.c.weight))),
    "iterate": lambda model: torch.stack(list(model.scale)),
    "index": lambda model: model.c.weight[1:3, ::2],
    "out=": lambda model: torch.mul(model.scale, 2.0, out=torch.empty(5)),
}


@pytest.mark.world_size(2, timeout_s=20)
def test_any_read_of_a_parameter_waits_for_it() -> None:
    publisher.start_all_gather = _start_late
    for stage in (1, 2):
        pair = Pair(_Model, setting=Setting(stage=stage, shard={"chunk_bytes": 64}))
        for name, read in _READS.items():
            pair.backward(_loss)
            pair.step()
            with torch.no_grad():
                assert_bit_equal({name: read(pair.model)}, {name: read(pair.plain)})
            pair.both(lambda model: model.train())
            assert_bit_equal(parameters(pair.model), parameters(pair.plain), what=name)
