"""What managers of heterogeneous memory have wasted, counted: bytes, waits, pages, nodes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.runtime import offload as runtime_offload
from shardwise.runtime.own_slices import OwnSlices
from shardwise.runtime.reduction import Reduction
from shardwise.runtime.state_slices import StateSlices
from shardwise.tiers import Copier, HostTier, Tiers, WorkerScheduler
from shardwise.tiers.memory import AcceleratorTier
from shardwise.tiers.pinned import PinnedMemory
from tests.unit.tiers.test_pinned import CountingRegistrar

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 64
BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)
EVERYTHING = sw.StaticOffload(parameters=1.0, optimizer=1.0)
NOT_IN_BACKWARD = -1


class Deep(nn.Module):
    """Layers without biases, each a chunk of its own where units are."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build(
    stage: int, num_layers: int = 6, **options: Any
) -> tuple[nn.Module, sw.ShardedOptimizer, Any]:
    """Shard a model with chunks of a layer each."""
    options = {"mixed_precision": BF16, **options}
    if stage < 3:
        options["chunk_bytes"] = (4 if options["mixed_precision"] is None else 2) * WIDTH**2
    model = sw.shard(Deep(num_layers), stage=stage, **options)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    engine: Any = model.__dict__["_shardwise"]
    assert len(engine.chunks) == num_layers
    return model, optimizer, engine


def backward(model: nn.Module, optimizer: sw.ShardedOptimizer) -> None:
    """One pass."""
    optimizer.backward(model(torch.ones(2, WIDTH)).float().square().mean())


def train(model: nn.Module, optimizer: sw.ShardedOptimizer) -> None:
    """One step."""
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


class HostCopies:
    """Bytes that leave and reach host memory while a patch is in place, by dtype."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.out_bytes: dict[torch.dtype, int] = {}
        self.in_bytes: dict[torch.dtype, int] = {}
        fill_own, take_gradient = OwnSlices.fill_own, StateSlices.take_gradient

        def fill(own: OwnSlices, place_S: Tensor) -> Tensor | None:
            sent_S = fill_own(own, place_S)
            if sent_S is None:  # copied from elsewhere
                self._add(self.out_bytes, own.parameter_S)
            return sent_S

        def take(state: StateSlices, mean_S: Tensor) -> Tensor:
            self._add(self.in_bytes, mean_S)
            return take_gradient(state, mean_S)

        patch.setattr(OwnSlices, "fill_own", fill)
        patch.setattr(StateSlices, "take_gradient", take)

    @staticmethod
    def _add(counts: dict[torch.dtype, int], tensor: Tensor) -> None:
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + num_bytes


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
def test_parameters_come_from_the_host_as_they_are_used(world_size: int) -> None:
    """In bfloat16 and twice a step at most: not as float32, and not again for every operator."""
    model, optimizer, engine = build(3, offload=EVERYTHING)
    for _ in range(2):
        train(model, optimizer)
    slices = sum(chunk.own.numel for chunk in engine.chunks)
    with pytest.MonkeyPatch.context() as patch:
        copies = HostCopies(patch)
        backward(model, optimizer)
        assert set(copies.out_bytes) == {torch.bfloat16}
        assert 2 * slices <= copies.out_bytes[torch.bfloat16] <= 2 * 2 * slices
        assert copies.in_bytes == {torch.bfloat16: 2 * slices}
        copies.out_bytes.clear()
        optimizer.step()
        assert copies.out_bytes == {}, "an update on the host needs no gather"


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_gradients_go_to_the_host_once(world_size: int) -> None:
    """As they are reduced, in their own dtype; in halves of the bytes of float32."""
    for reduce_dtype in (torch.bfloat16, torch.float32):
        precision = sw.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model, optimizer, engine = build(
            2, offload=sw.StaticOffload(optimizer=1.0), mixed_precision=precision
        )
        train(model, optimizer)
        slices = sum(chunk.own.numel for chunk in engine.chunks)
        with pytest.MonkeyPatch.context() as patch:
            copies = HostCopies(patch)
            train(model, optimizer)
            assert copies.in_bytes == {reduce_dtype: reduce_dtype.itemsize * slices}


def test_updated_values_return_in_the_dtype_of_the_parameter() -> None:
    """The first copy of a step to the accelerator took float32: twice the bytes."""
    sent: list[torch.dtype] = []

    class Sent(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.copy_.default and args[0].is_meta:
                sent.append(args[1].dtype)
            return func(*args, **(kwargs or {}))

    working_S = torch.empty(8, dtype=torch.bfloat16, device="meta")  # stands for another device
    own = OwnSlices(working_S, torch.ones(8), keeps_masters=True)
    with Sent():
        own.refresh_working()
    assert sent == [torch.bfloat16]


class Reads(TorchDispatchMode):
    """Counts reads of device values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_waits_for_no_value_of_a_chunk(stage: int) -> None:
    """To test each reduced chunk for infinity, NaN and its norm stops the device three times."""
    half = sw.MixedPrecision(param_dtype=torch.float16, loss_scale=sw.LossScale(initial_scale=1.0))
    state = sw.StaticOffload(optimizer=1.0)
    for offload in (None, state, EVERYTHING) if stage == 3 else (None, state):
        counts = []
        for num_layers in (2, 12):
            model, optimizer, _ = build(stage, num_layers, mixed_precision=half, offload=offload)
            train(model, optimizer)
            loss = model(torch.ones(2, WIDTH)).float().square().mean()
            reads, end = Reads(), Reduction.end

            def watched(*args: Any, reads: Reads = reads, end: Any = end) -> None:
                with reads:  # a thread of its own ends reductions
                    end(*args)

            with pytest.MonkeyPatch.context() as patch, reads:
                patch.setattr(Reduction, "end", watched)
                optimizer.backward(loss)
            counts.append(reads.num_reads)
        assert counts[0] == counts[1] <= 3, (offload, counts)


class Waiting:
    """Stands for the work of a call, and notes waits while autograd runs."""

    def __init__(self, work: Any, waits: list[int]) -> None:
        self._work, self._waits = work, waits

    def wait(self, *args: Any) -> Any:
        if torch._C._current_graph_task_id() != NOT_IN_BACKWARD:
            self._waits.append(1)
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@pytest.mark.world_size(2, 3, timeout_s=60)
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_reductions_start_in_backward_and_are_waited_for_behind_it(is_offloaded: bool) -> None:
    """A reduction that blocks the hook of a gradient hides behind nothing."""
    offload = sw.StaticOffload(optimizer=1.0) if is_offloaded else None
    model, optimizer, _ = build(2, 8, offload=offload)
    train(model, optimizer)
    train(model, optimizer)
    waits: list[int] = []
    begun: list[bool] = []

    def patched(real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        begun.append(torch._C._current_graph_task_id() != NOT_IN_BACKWARD)
        return Waiting(real(*args, **named), waits)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("isend", "irecv"):
            patch.setattr(dist, name, partial(patched, getattr(dist, name)))
        loss = model(torch.ones(2, WIDTH)).float().square().mean()
        begun.clear()
        optimizer.backward(loss)
    assert sum(begun) >= len(begun) // 2 > 0
    assert not waits


def count_nodes(tensor: Tensor) -> int:
    """Count the nodes of a graph."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return len(seen)


@pytest.mark.world_size(2, timeout_s=60)
def test_the_graph_is_that_of_the_plain_module() -> None:
    """Two identities around every operator that takes a parameter triple its length."""
    plain = count_nodes(Deep()(torch.ones(2, WIDTH)))
    for stage, offload in ((0, None), (1, None), (2, None), (3, None), (3, EVERYTHING)):
        model, optimizer, _ = build(stage, mixed_precision=None, offload=offload)
        for _ in range(2):
            assert count_nodes(model(torch.ones(2, WIDTH))) == plain, (stage, offload)
            train(model, optimizer)


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_pages_are_locked_for_what_rests_on_the_host_and_nothing_else(
    world_size: int, monkeypatch
) -> None:
    """Six bytes a parameter were once locked where nothing ever left the accelerator."""
    opened: list[PinnedMemory] = []

    def open_tiers(device: torch.device, **_: Any) -> Tiers:
        opened.append(PinnedMemory(CountingRegistrar()))
        host = HostTier(pinned=opened[-1])
        return Tiers(AcceleratorTier(device), host, None, copier=Copier(WorkerScheduler()))

    monkeypatch.setattr(runtime_offload, "open_tiers", open_tiers)
    numel = 6 * WIDTH * WIDTH / world_size
    for stage, offload, at_rest in (
        (2, None, 0),
        (3, None, 0),
        (2, sw.StaticOffload(optimizer=1.0), 12),
        (3, sw.StaticOffload(optimizer=1.0), 12),
        (3, EVERYTHING, 14),
    ):
        opened.clear()
        model, optimizer, _ = build(stage, offload=offload)
        for _ in range(3):
            train(model, optimizer)
        if offload is None:
            assert not opened
            continue
        [pinned] = opened
        gradients = 2 * numel
        assert at_rest * numel <= pinned.registered_bytes <= at_rest * numel + gradients
