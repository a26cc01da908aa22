"""Ways in which managers of heterogeneous memory have been wrong, each as the property it broke."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.report import held_bytes
from tests.distributed.offload.test_usage import Blocks
from tests.distributed.parameters.test_tensor_parallel_models import Model as SplitModel
from tests.distributed.parameters.test_tensor_parallel_models import split
from tests.distributed.test_faults_zero12 import Recomputed
from tests.distributed.usage import test_an_exception_leaves_no_half_state as interrupted
from tests.kit.models import CASES, TinyLSTM
from tests.kit.oracle import assert_bit_equal, seed
from tests.kit.pair import Pair, Setting, adamw, full_gradients, parameters, sgd

fused_adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)


def homes(folder: Any, *, parameters: float = 0.0) -> list[sw.StaticOffload | None]:
    """Nowhere else, everything or half of it in host memory, everything on disk."""
    return [
        None,
        sw.StaticOffload(optimizer=1.0, parameters=parameters),
        sw.StaticOffload(optimizer=0.5, parameters=parameters / 2),
        sw.StaticOffload(optimizer=1.0, parameters=parameters, to="disk", disk_path=folder),
    ]


def everywhere(folder: Any) -> list[tuple[int, sw.StaticOffload | None]]:
    """Each home at stages 2 and 3, with parameters there where they can be."""
    return [
        (stage, offload)
        for stage in (2, 3)
        for offload in homes(folder, parameters=float(stage == 3))
    ]


# ---------------------------------------------------------------------- clipping


@pytest.mark.world_size(4, timeout_s=90)
def test_norms_count_split_parameters_over_the_model_axis(tmp_path) -> None:
    """Summed over the data axis alone, a norm misses what the other model ranks have."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = SplitModel()
    plain(torch.ones(3, 8)).square().mean().backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    for stage, offload in everywhere(tmp_path):
        torch.manual_seed(0)
        model = sw.shard(
            split(SplitModel(), mesh["tp"]), stage=stage, mesh=mesh["dp"], offload=offload
        )
        optimizer = sw.ShardedOptimizer(fused_adamw(model.parameters()), clip_grad_norm=0.01)
        optimizer.backward(model(torch.ones(3, 8)).square().mean())
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(expected.item(), rel=1e-5), (stage, offload)


@pytest.mark.world_size(4, timeout_s=60)
def test_groups_of_ranks_are_asked_in_one_order(tmp_path) -> None:
    """Kept in a set that hashes addresses, two groups are asked in another order on each rank."""
    rank = dist.get_rank()
    garbage = [bytearray(1000 * (1 + rank)) for _ in range(500 * rank)]  # other addresses
    rows, columns = ([0, 1], [2, 3]), ([0, 2], [1, 3])
    meshes: list[DeviceMesh | None] = [None]
    for groups in (rows, columns):
        made = [dist.new_group(group) for group in groups]
        [own] = [g for g, ranks in zip(made, groups, strict=True) if rank in ranks]
        assert isinstance(own, dist.ProcessGroup)
        meshes.append(DeviceMesh.from_group(own, "cpu"))
    for stage, offload in everywhere(tmp_path):
        torch.manual_seed(0)
        models = [
            sw.shard(nn.Linear(9, 5), stage=stage, mesh=mesh, offload=offload)
            for mesh in (*meshes, *meshes)
        ]
        members = [p for model in models for p in model.parameters()]
        optimizer = sw.ShardedOptimizer(fused_adamw(members), clip_grad_norm=0.01)
        for _ in range(2):
            optimizer.backward(sum((m(torch.ones(2, 9)).sum() for m in models), torch.zeros(())))
            asked: list[int] = []
            real = dist.all_reduce

            def note(
                tensor: Tensor, *args: Any, asked: list[int] = asked, real: Any = real, **named: Any
            ) -> Any:
                group = named.get("group") or next(
                    (a for a in args if isinstance(a, dist.ProcessGroup)), None
                )
                ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
                asked.append(4 if len(ranks) == 4 else ranks[1] - ranks[0])
                return real(tensor, *args, **named)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "all_reduce", note)
                optimizer.step()
            optimizer.zero_grad()
            assert set(asked) == {1, 2, 4}
            everyone: list[Any] = [None] * 4
            dist.all_gather_object(everyone, asked)
            assert everyone == [asked] * 4
    assert len(garbage) == 500 * rank


@pytest.mark.world_size(2, 3, 4, timeout_s=60)
def test_a_half_sum_beyond_its_range_has_a_mean_within(world_size: int, tmp_path) -> None:
    """40000 from every rank: divided after a sum in float16, that is infinity."""
    half = sw.MixedPrecision(param_dtype=torch.float16, loss_scale=sw.LossScale(initial_scale=1.0))
    for stage, offload in everywhere(tmp_path):
        model = sw.shard(
            nn.Linear(50, 1, bias=False), stage=stage, mixed_precision=half, offload=offload
        )
        model.load_state_dict({"weight": torch.zeros(1, 50)})
        optimizer = sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**-10))
        optimizer.backward(model(torch.full((1, 50), 40000.0)).sum())
        optimizer.step()
        assert not optimizer.last_step_skipped
        [value] = optimizer.state_dict()["shardwise"]["masters"].values()
        assert torch.equal(value, torch.full((1, 50), -40000.0 / 1024)), (stage, offload)


# ---------------------------------------------------------------------- what is gathered


class Sandwich(nn.Module):
    """Six blocks, run through twice: what was used first is needed again before what came last.

    Evaluated, it runs through them once and backwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        blocks = [*self.blocks, *self.blocks] if self.training else reversed(self.blocks)
        for block in blocks:
            x = torch.tanh(block(x))
        return x


def wave(model: nn.Module, rank: int) -> Tensor:
    """The mean square over random inputs."""
    return model(torch.randn(3, 16)).square().mean()


def count_gathers(uses: list[Any], num_held: int, *, knows_next: bool) -> int:
    """Count gathers of chunks of one size; without next uses the oldest goes first."""
    held: list[Any] = []
    count = 0
    for at, item in enumerate(uses):
        if item in held:
            continue
        count += 1
        if len(held) == num_held:
            rest = [*uses[at:], *held]
            held.remove(max(held, key=rest.index) if knows_next else held[0])
        held.append(item)
    return count


@pytest.mark.world_size(2, 3, timeout_s=60)
def test_what_is_needed_last_is_let_go_first(world_size: int) -> None:
    """A policy that knows no next uses lets chunks go in the order in which they came."""
    for num_kept in (3, 4, 5):
        [(numel, *_)] = {tuple(p.shape) for p in Sandwich().blocks[0].parameters()} - {(16,)}
        keep_bytes = num_kept * 4 * (numel * 16 + 16)
        setting = Setting(stage=3, shard={"reshard_after_forward": keep_bytes})
        pair = Pair(Sandwich, sgd, setting=setting)
        engine: Any = pair.model._shardwise
        gatherer, order = engine.residence.gatherer, engine.residence.gatherer.order
        gatherer.prefetch_bytes = 0  # to gather early may cost a gather; victims are counted here
        [whole_bytes] = {chunk.whole_bytes for chunk in engine.chunks}
        num_held = gatherer.limit_bytes // whole_bytes
        pair.train(wave, num_steps=2)
        uses: list[Any] = []
        real = order.note
        order.note = lambda item, uses=uses, real=real: (uses.append(item), real(item))
        gatherer.num_gathers = 0
        pair.backward(wave)
        del order.note
        fewest = count_gathers(uses, num_held, knows_next=True)
        oldest = count_gathers(uses, num_held, knows_next=False)
        # at the turn to backward all are equal: its order is not that of forward
        assert gatherer.num_gathers <= fewest + 1 < oldest, (num_held, gatherer.num_gathers, fewest)


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("choice", ["accelerator", "host", "budget"])
def test_evaluations_in_between_shift_no_decision(choice: str) -> None:
    """A cyclic index into a recorded step, which evaluations advance too, is wrong ever after."""
    offload = {
        "accelerator": None,
        "host": sw.StaticOffload(parameters=1.0, optimizer=1.0),
        "budget": sw.AdaptiveOffload(sw.Budget(accelerator=12_000)),
    }[choice]
    counts: dict[bool, list[tuple[int, int, int]]] = {}
    for evaluates in (False, True):
        pair = Pair(Sandwich, sgd, setting=Setting(stage=3, shard={"offload": offload}))
        engine: Any = pair.model._shardwise
        gatherer = engine.residence.gatherer
        host = None if engine.offload is None else engine.offload.mover.tiers.host
        for step in range(5):
            gatherer.num_gathers, gatherer.peak_bytes = 0, 0
            pair.train(wave, num_steps=1)
            rests_bytes = 0 if host is None else host.allocated_bytes
            assert (rests_bytes > 0) is (host is not None)
            count = gatherer.num_gathers, gatherer.peak_bytes, rests_bytes
            counts.setdefault(evaluates, []).append(count)
            for _ in range(step if evaluates else 0):
                with torch.no_grad():
                    wave(pair.model.eval(), 0)
                pair.model.train()
    assert counts[True][2:] == counts[False][2:], counts


@pytest.mark.world_size(2, timeout_s=60)
def test_nothing_that_was_decided_keeps_a_deleted_model(tmp_path) -> None:
    """Answers cached by manager and chunk keep both, and the memory behind them."""
    for stage, offload in everywhere(tmp_path)[4:6]:
        shard = {"offload": offload} | ({"reshard_after_forward": 5000} if stage == 3 else {})
        pair = Pair(Sandwich, adamw, setting=Setting(stage=stage, shard=shard))
        pair.train(wave, num_steps=3)
        engine: Any = pair.model._shardwise
        tiers = None if engine.offload is None else engine.offload.mover.tiers
        watched = [weakref.ref(one) for one in (pair.model, engine, engine.chunks[0])]
        del pair, engine
        gc.collect()
        gc.collect()  # what hooks held is found unreachable by the first
        assert [ref() for ref in watched] == [None] * len(watched), (stage, offload)
        assert tiers is None or tiers.host.allocated_bytes == 0


class Pieces(nn.Module):
    """Operators with several outputs, on parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Parameter(torch.randn(9, 5))
        self.stacked = nn.Parameter(torch.randn(3, 5, 5))
        self.lstm = TinyLSTM()

    def forward(self, x: Tensor) -> Tensor:
        up, gate, down = torch.split(self.joined, [3, 3, 3])
        for weight in self.stacked.unbind(0):
            x = torch.tanh(x @ weight)
        first, _ = torch.chunk(self.stacked, 2)
        x = (x @ up.t()) * torch.sigmoid(x @ gate.t()) @ down + x @ first[0]
        tokens = torch.arange(6).view(1, 6)
        return x.sum(-1) + self.lstm(tokens).mean()


@pytest.mark.world_size(1, 3, timeout_s=60)
def test_operators_with_several_outputs_gather_for_their_backward(
    world_size: int, tmp_path
) -> None:
    """Backward hooks that never fire for tuples leave chunks released that backward reads."""
    for offload in homes(tmp_path, parameters=1.0):
        for chunk_bytes in (None, 200) if offload is None else (200,):
            shard = {"offload": offload, "chunk_bytes": chunk_bytes}
            pair = Pair(Pieces, setting=Setting(stage=3, shard=shard))
            pair.train(lambda model, rank: model(torch.randn(3, 5)).square().mean())


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
def test_a_layer_in_two_recomputed_segments_keeps_its_weights(world_size: int, tmp_path) -> None:
    """Gradients of the first segment written over the weights are what the second computes with."""
    for stage, offload in everywhere(tmp_path):
        pair = Pair(Recomputed, sgd, setting=Setting(stage=stage, shard={"offload": offload}))
        for _ in range(3):
            pair.backward(lambda model, rank: model(torch.randn(3, 6)).square().mean())
            for name, gradient in full_gradients(pair.model).items():
                expected = pair.plain.get_parameter(name).grad
                torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
            pair.step()
            pair.plain.load_state_dict(parameters(pair.model))


# ---------------------------------------------------------------------- updates


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
def test_every_parameter_counts_its_own_updates(world_size: int, tmp_path) -> None:
    """One counter for a whole fused call corrects the bias of rarely used layers wrongly."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(torch.randn(3, 6)).square().mean()

    for stage, offload in everywhere(tmp_path):
        for chunk_bytes in (None, 400) if offload is None else (400,):
            shard = {"offload": offload, "chunk_bytes": chunk_bytes}
            pair = Pair(
                Blocks,
                lambda m: fused_adamw(m.parameters()),
                setting=Setting(stage=stage, shard=shard),
            )
            for step in range(6):
                pair.both(lambda model, step=step: setattr(model, "skipped", step % 3))
                pair.train(loss, num_steps=1)
            steps = {int(entry["step"]) for entry in pair.optimizer.state_dict()["state"].values()}
            assert steps == {4, 6}


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_scaled_gradients_are_updated_with_wherever_their_state_lies(tmp_path) -> None:
    """An update on the host that takes no scale, or none on the accelerator, is of no use."""
    case = CASES["gpt"]
    for stage in (2, 3):
        found = []
        for offload in homes(tmp_path, parameters=float(stage == 3)):
            torch.manual_seed(0)
            half = sw.MixedPrecision(
                param_dtype=torch.float16,
                loss_scale=sw.LossScale(initial_scale=2.0**10, growth_interval=2),
            )
            model = sw.shard(case.build(), stage=stage, mixed_precision=half, offload=offload)
            optimizer = sw.ShardedOptimizer(fused_adamw(model.parameters()), clip_grad_norm=0.05)
            for step in range(4):
                seed(step=step, rank=dist.get_rank(), micro_batch=0)
                optimizer.backward(case.loss(model))
                optimizer.step()
                assert not optimizer.last_step_skipped
                assert 0.06 < optimizer.grad_norm < 100  # free of the scale, and clipped
                optimizer.zero_grad()
            assert optimizer.loss_scale == 2.0**12
            found.append(parameters(model))
        for values in found[1:]:
            assert_bit_equal(values, found[0], what=f"stage {stage}")


@pytest.mark.world_size(1, 2, timeout_s=60)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_fraction_on_disk_is_a_fraction_of_the_bytes(stage: int, tmp_path) -> None:
    """Counted from storages that were released already, the fraction of nothing is nothing."""
    numel = 8 * (16 * 16 + 16)
    for fraction in (0.25, 0.5, 1.0):
        choice = sw.StaticOffload(
            optimizer=fraction,
            parameters=fraction if stage == 3 else 0.0,
            to="disk",
            disk_path=tmp_path,
        )
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
        sw.shard(model, stage=stage, offload=choice, chunk_bytes=1200)
        optimizer = sw.ShardedOptimizer(fused_adamw(model.parameters()))
        for _ in range(2):
            optimizer.backward(model(torch.ones(1, 16)).sum())
            optimizer.step()
            optimizer.zero_grad()
        expected = 12 * numel * fraction / dist.get_world_size()
        assert held_bytes(model, optimizer).disk == pytest.approx(expected, rel=0.15)


# ---------------------------------------------------------------------- errors


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("fails", ["forward", "backward", "optimizer"])
def test_an_error_amid_a_step_leaves_no_half_state(fails: str, tmp_path) -> None:
    """States of chunks that nothing resets make every later step fail."""
    for stage, offload in everywhere(tmp_path):
        setting = Setting(stage=stage, shard={"chunk_bytes": 64, "offload": offload})
        pair = Pair(interrupted._Model, setting=setting)
        pair.train(interrupted._loss, num_steps=2)
        pair.backward(interrupted._loss)
        with pytest.raises(RuntimeError, match="out of memory"):
            interrupted._fail(pair, fails, bare=False)
        pair.model.fails = None
        pair.zero_grad()
        if stage == 3:
            residence = pair.model._shardwise.residence  # type: ignore[union-attr]
            assert residence is None or residence.gatherer.gathered_bytes == 0
        pair.train(interrupted._loss, num_steps=2)
