"""What users do with a model and its optimizer stays the same when state rests elsewhere."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import Pair, Setting, adamw, assert_same_state, parameters, sgd

BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)


class Blocks(nn.Module):
    """A few layers, one of which some passes skip."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.skipped = -1

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = torch.tanh(layer(x))
        return x


def loss(model, rank):
    return model(torch.randn(3, 6)).square().mean()


def homes(folder, *, parameters: float = 0.0) -> list[sw.StaticOffload]:
    return [
        sw.StaticOffload(optimizer=1.0, parameters=parameters),
        sw.StaticOffload(optimizer=1.0, parameters=parameters, to="disk", disk_path=folder),
    ]


def pair_of(stage, offload, build=Blocks, make=adamw, **shard) -> Pair:
    shard = {"offload": offload, "chunk_bytes": 400, **shard}
    return Pair(build, make, setting=Setting(stage=stage, shard=shard))


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
def test_unused_frozen_and_unfrozen_parameters(stage, tmp_path) -> None:
    for offload in homes(tmp_path, parameters=float(stage == 3)):
        pair = pair_of(stage, offload)
        pair.both(lambda model: model.layers[1].requires_grad_(False))
        pair.train(loss, num_steps=2)
        pair.both(lambda model: setattr(model, "skipped", 2))
        pair.train(loss, num_steps=2)
        pair.both(lambda model: model.layers[1].requires_grad_(True))
        pair.train(loss, num_steps=2)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layers_frozen_from_the_start_are_updated_once_unfrozen(stage, tmp_path) -> None:
    def build() -> nn.Module:
        model = Blocks()
        model.layers[0].requires_grad_(False)
        return model

    for offload in homes(tmp_path, parameters=float(stage == 3)):
        pair = pair_of(stage, offload, build)
        pair.train(loss, num_steps=2)
        pair.both(lambda model: model.layers[0].requires_grad_(True))
        pair.train(loss, num_steps=2)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_values_written_by_the_user_reach_the_update(stage, tmp_path) -> None:
    def rescale(model) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)

    for offload in homes(tmp_path, parameters=float(stage == 3)):
        pair = pair_of(stage, offload)
        pair.train(loss, num_steps=2)
        with sw.full_parameters(pair.model, writeback=True):
            rescale(pair.model)
        rescale(pair.plain)
        pair.train(loss, num_steps=2)
        state = {k: torch.ones_like(v) * 0.1 for k, v in pair.plain.state_dict().items()}
        pair.both(lambda model, state=state: model.load_state_dict(state))
        pair.train(loss, num_steps=2)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_state_moves_between_homes_and_plain_torch(stage, precision, tmp_path) -> None:
    def make(offload):
        torch.manual_seed(0)
        model = sw.shard(Blocks(), stage=stage, mixed_precision=precision, offload=offload)
        return model, sw.ShardedOptimizer(adamw(model))

    def step(model, optimizer, seed) -> None:
        torch.manual_seed(seed)
        optimizer.backward(loss(model, 0).float())
        optimizer.step()
        optimizer.zero_grad()

    choices = [None, *homes(tmp_path, parameters=float(stage == 3))]
    model, optimizer = make(None)
    step(model, optimizer, 1)
    saved, weights = optimizer.state_dict(), model.state_dict()
    for source in choices:
        first = make(source)
        step(*first, 1)
        assert_same_state(first[1].state_dict(), saved)
        for target in choices:
            second = make(target)
            second[0].load_state_dict(weights)
            second[1].load_state_dict(first[1].state_dict())
            assert_same_state(second[1].state_dict(), saved)
            step(*second, 2)
            if target is choices[0]:
                expected = parameters(second[0])
            assert_bit_equal(parameters(second[0]), expected, what=f"{source} to {target}")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_that_need_whole_matrices(stage, tmp_path) -> None:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def muon(model) -> torch.optim.Optimizer:
        return torch.optim.Muon(model.parameters(), lr=0.1)

    for offload in homes(tmp_path, parameters=float(stage == 3)):
        pair_of(stage, offload, Matrices, muon).train(loss, num_steps=3)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_of_ones_own_is_stepped_once(stage, tmp_path) -> None:
    class Counting(torch.optim.SGD):
        calls = 0

        def step(self, closure=None):
            type(self).calls += 1
            return super().step(closure)

    def make(model) -> torch.optim.Optimizer:
        return Counting(model.parameters(), lr=0.1, momentum=0.9)

    for offload in homes(tmp_path, parameters=float(stage == 3)):
        Counting.calls = 0
        pair_of(stage, offload, make=make).train(loss, num_steps=3)
        assert Counting.calls == 6  # the sharded one and its twin


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_skipped_steps_change_nothing(stage, tmp_path) -> None:
    for offload in homes(tmp_path, parameters=float(stage == 3)):
        pair = pair_of(stage, offload, make=sgd)
        pair.train(loss, num_steps=2)
        before = parameters(pair.model)
        scale = float("inf") if pair.rank == 0 else 1.0
        pair.optimizer.backward(loss(pair.model, 0) * scale)
        pair.optimizer.step()
        assert pair.optimizer.last_step_skipped
        assert_bit_equal(parameters(pair.model), before, what="after a skipped step")
        pair.zero_grad()
        pair.train(loss, num_steps=2)


@pytest.mark.world_size(2)
def test_an_error_amid_the_update_leaves_ranks_equal(tmp_path, monkeypatch) -> None:
    module = sys.modules["torch.optim.sgd"]
    real, calls = module.sgd, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("amid the update")
        return real(*args, **kwargs)

    for offload in homes(tmp_path):
        pair = pair_of(2, offload, make=sgd)
        pair.train(loss, num_steps=2)
        pair.optimizer.backward(loss(pair.model, 0))
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, "sgd", failing)
            with pytest.raises(RuntimeError, match="amid the update"):
                pair.optimizer.step()
        pair.optimizer.zero_grad()
        values = parameters(pair.model)
        gathered: list[dict] = [{}, {}]
        dist.all_gather_object(gathered, values)
        assert_bit_equal(gathered[0], gathered[1], what="over ranks")
        assert all(value.isfinite().all() for value in values.values())
        pair.optimizer.backward(loss(pair.model, 0))
        pair.optimizer.step()


@pytest.mark.world_size(4)
def test_a_hybrid_mesh(tmp_path) -> None:
    for stage in (2, 3):
        for offload in homes(tmp_path, parameters=float(stage == 3)):
            shard = {"shard_size": 2, "offload": offload, "chunk_bytes": 400}
            setting = Setting(stage=stage, shard=shard, run_size=2)
            Pair(Blocks, adamw, setting=setting).train(loss)


@pytest.mark.world_size(1)
def test_a_model_larger_than_its_working_memory_on_one_process(tmp_path) -> None:
    """Stage 3 alone: parameters come from where they rest, a unit at a time."""
    for offload in homes(tmp_path, parameters=1.0):
        pair = pair_of(3, offload, lambda: nn.Sequential(*[Blocks() for _ in range(6)]))
        pair.train(loss, num_steps=3)
        gatherer = pair.model._shardwise.residence.gatherer
        gatherer.peak_bytes = 0  # comparing has gathered the whole model
        pair.backward(loss)
        pair.step()
        assert 0 < gatherer.peak_bytes < sum(p.numel() * 4 for p in pair.model.parameters())


@pytest.mark.world_size(1, 2)
def test_choices_that_cannot_work_are_refused_on_all_ranks(tmp_path) -> None:
    bad = [
        (2, {"offload": "host"}, "StaticOffload"),
        (2, {"offload": sw.StaticOffload(parameters=0.5)}, "stage 3"),
        (3, {"offload": _on(tmp_path / "missing")}, "missing"),
    ]
    if dist.get_rank() == 0:
        (tmp_path / "there").mkdir()
    dist.barrier()
    for stage, options, word in bad:
        model = Blocks()
        with pytest.raises(sw.ConfigurationError, match=word):
            sw.shard(model, stage=stage, **options)
        assert not any("_shardwise" in p.__dict__ for p in model.parameters())
    if dist.get_world_size() == 2:
        model = Blocks()
        place = "there" if dist.get_rank() else "missing"
        with pytest.raises(sw.ConfigurationError):
            sw.shard(model, stage=3, offload=_on(tmp_path / place))
    sw.shard(model, stage=3, offload=_on(tmp_path / "there"))


def _on(folder) -> sw.StaticOffload:
    return sw.StaticOffload(optimizer=1.0, to="disk", disk_path=folder)
