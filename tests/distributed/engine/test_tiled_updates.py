"""An update that is cut into tiles changes no bit, whatever the optimizer and wherever it cuts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.optimizer import stepping
from shardwise.optimizer.kinds import ELEMENT_WISE
from tests.kit.models import CASES
from tests.kit.offloaded import use_hostile_tiers
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import parameters
from tests.kit.sharded import Setting, assert_like_one_process, build, fused_adamw, run_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPTIONS: dict[str, list[dict]] = {
    "ASGD": [{"t0": 1.0}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1}, {"fused": True}],
    "Adam": [
        {"amsgrad": True, "weight_decay": 0.1},
        {"maximize": True, "fused": True},
        {"lr": torch.tensor(0.01), "fused": True},
        {"foreach": True},
    ],
    "AdamW": [{}, {"amsgrad": True, "fused": True}, {"lr": torch.tensor(0.01)}],
    "Adamax": [{"weight_decay": 0.1}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"weight_decay": 0.1}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True}],
}
VARIANTS = [
    pytest.param(kind, options, id=f"{kind.__name__}-{number}")
    for kind in sorted(ELEMENT_WISE, key=lambda kind: kind.__name__)
    for number, options in enumerate(OPTIONS[kind.__name__])
]


def make(kind, options, model: nn.Module) -> torch.optim.Optimizer:
    own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return kind(model.parameters(), **own)


def cut_at(monkeypatch, numel: int) -> list[int]:
    """Make tiles small; the list grows by the number of tiles of every update."""
    seen: list[int] = []

    def cut(records, slice_numel, *, tile_numel):
        tiles = real(records, slice_numel, tile_numel=tile_numel)
        seen.append(len(tiles or ()))
        return tiles

    real = stepping.cut_tiles
    monkeypatch.setattr(stepping, "cut_tiles", cut)
    monkeypatch.setattr(stepping, "tile_numel", lambda: numel)
    return seen


@pytest.mark.world_size(1, 3, timeout_s=90)
@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_every_optimizer_is_bit_equal(kind, options, monkeypatch) -> None:
    for param, reduce in [(BF16, FP32), (BF16, None)]:
        seen = cut_at(monkeypatch, 333)
        setting = Setting(param_dtype=param, reduce_dtype=reduce)
        assert_like_one_process(CASES["gpt"], partial(make, kind, options), setting)
        assert max(seen) > 3
        monkeypatch.undo()


@pytest.mark.world_size(1, 2, 3, timeout_s=90)
@pytest.mark.parametrize("tile_numel", [64, 333, 1001])
def test_every_cut_is_bit_equal(tile_numel, monkeypatch) -> None:
    """Vector units work on many elements at once: where a tile ends must not show."""
    case = CASES["gpt"]
    for stage, make_optimizer in [(1, fused_adamw), (3, partial(make, torch.optim.AdamW, {}))]:
        for param, reduce in [(BF16, FP32), (FP16, None), (None, None)]:
            seen = cut_at(monkeypatch, tile_numel)
            setting = Setting(
                stage=stage, param_dtype=param, reduce_dtype=reduce, num_micro_batches=2
            )
            assert_like_one_process(case, make_optimizer, setting)
            assert (max(seen, default=0) > 1) == (param is not None or stage == 3)
            monkeypatch.undo()


def trained(make_optimizer, setting, *, num_steps: int = 3) -> dict[str, torch.Tensor]:
    """Return parameters and state after some steps."""
    case = CASES["gpt"]
    model, optimizer = build(case, make_optimizer, setting)
    for step in range(num_steps):
        run_step(model, optimizer, case, setting, step)
    values = parameters(model)
    saved = optimizer.state_dict()
    for index, state in saved["state"].items():
        values |= {f"{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    for index, master in saved.get("shardwise", {}).get("masters", {}).items():
        values[f"{index}.master"] = master
    return values


@pytest.mark.world_size(1, 2, timeout_s=90)
@pytest.mark.parametrize("stage", [1, 3])
def test_scaling_and_clipping_are_those_of_whole_chunks(stage, monkeypatch) -> None:
    adamw = partial(make, torch.optim.AdamW, {"weight_decay": 0.1})
    for param, reduce in [(BF16, FP32), (FP16, FP16), (None, None)]:
        for make_optimizer in (adamw, fused_adamw):
            setting = Setting(
                stage=stage, param_dtype=param, reduce_dtype=reduce, clip_grad_norm=0.01
            )
            seen = cut_at(monkeypatch, 200)
            values = trained(make_optimizer, setting)
            assert max(seen) > 3
            monkeypatch.undo()
            monkeypatch.setattr(stepping, "ELEMENT_WISE", frozenset())
            assert_bit_equal(values, trained(make_optimizer, setting), what=str(setting))
            monkeypatch.undo()


@pytest.mark.world_size(1, 2, timeout_s=90)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_tiles_of_state_that_rests_elsewhere_are_bit_equal(stage, to, tmp_path, monkeypatch):
    place = {"to": to, "disk_path": tmp_path if to == "disk" else None}
    parts = [{"optimizer": 1.0}] + [{"optimizer": 1.0, "parameters": 1.0}] * (stage == 3)
    for part in parts:
        for param, reduce in [(BF16, FP32), (FP16, None), (None, None)]:
            use_hostile_tiers(monkeypatch)
            seen = cut_at(monkeypatch, 150)
            choice = sw.StaticOffload(**part, **place)
            setting = Setting(
                stage=stage,
                param_dtype=param,
                reduce_dtype=reduce,
                num_micro_batches=2,
                options={"chunk_bytes": 20_000, "offload": choice},
            )
            for make_optimizer in (fused_adamw, partial(make, torch.optim.AdamW, {})):
                assert_like_one_process(CASES["gpt"], make_optimizer, setting)
            assert max(seen) > 3
            monkeypatch.undo()


@pytest.mark.world_size(1, 2)
def test_frozen_and_unused_parameters_keep_their_bits(monkeypatch) -> None:
    cut_at(monkeypatch, 64)
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(17, 17) for _ in range(4)])
    model[1].requires_grad_(False)
    sw.shard(model, stage=2, mixed_precision=sw.MixedPrecision(param_dtype=BF16))
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), weight_decay=0.5))
    before = parameters(model)
    for _ in range(2):
        x = model[3](model[1](model[0](torch.ones(2, 17, dtype=BF16))))
        optimizer.backward(x.float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    after = parameters(model)
    for name, value in after.items():
        is_trained = name[0] in "03"
        assert torch.equal(value, before[name]) != is_trained, name
    assert set(optimizer.state_dict()["state"]) == {0, 1, 6, 7}


@pytest.mark.world_size(1)
def test_counters_stay_the_same_tensors(monkeypatch) -> None:
    cut_at(monkeypatch, 100)
    case, setting = CASES["mlp"], Setting(param_dtype=BF16)
    model, optimizer = build(case, fused_adamw, setting)
    run_step(model, optimizer, case, setting, 0)
    before = {id(piece): state["step"] for piece, state in optimizer.state.items()}
    run_step(model, optimizer, case, setting, 1)
    assert {id(piece): state["step"] for piece, state in optimizer.state.items()} == before
    assert all(step.item() == 2 for step in before.values())


@pytest.mark.world_size(1)
def test_an_optimizer_is_stepped_once_for_all_tiles(monkeypatch) -> None:
    cut_at(monkeypatch, 100)
    calls = []
    case, setting = CASES["mlp"], Setting(param_dtype=BF16)
    model, optimizer = build(case, fused_adamw, setting)
    inner = optimizer.unwrap()
    monkeypatch.setattr(inner, "step", lambda: calls.append(type(inner).step(inner)))
    for step in range(2):
        run_step(model, optimizer, case, setting, step)
    assert len(calls) == 2


class Interrupted(Exception):
    pass


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("to", [None, "host", "disk"])
def test_an_error_between_tiles_leaves_ranks_equal_and_trainable(
    stage, to, tmp_path, monkeypatch
) -> None:
    place = {"to": to, "disk_path": tmp_path if to == "disk" else None}
    choice = None if to is None else sw.StaticOffload(optimizer=1.0, **place)
    cut_at(monkeypatch, 100)
    case = CASES["mlp"]
    setting = Setting(stage=stage, options={"offload": choice, "chunk_bytes": 20_000})
    model, optimizer = build(case, partial(make, torch.optim.AdamW, {}), setting)
    run_step(model, optimizer, case, setting, 0)
    with sw.full_parameters(model, writeback=True):
        for p in model.parameters():
            p.data.mul_(0.5)  # autograd does not see it
    _reference, _second = build(case, partial(make, torch.optim.AdamW, {}), setting)
    real = torch.optim.AdamW.step.__wrapped__
    num_left = 3

    def failing(self, closure=None):
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise Interrupted
        return real(self, closure)

    monkeypatch.setattr(torch.optim.AdamW.step, "__wrapped__", failing)
    before = parameters(model)
    with pytest.raises(Interrupted):
        run_step(model, optimizer, case, setting, 1)
    monkeypatch.setattr(torch.optim.AdamW.step, "__wrapped__", real)
    optimizer.zero_grad()
    after = parameters(model)
    changed = sum(int((after[name] != before[name]).sum()) for name in after)
    assert 0 < changed <= 300 * torch.distributed.get_world_size()
    gathered: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, after)
    for other in gathered:
        assert_bit_equal(other, after, what="over ranks")
    assert set(optimizer.state) <= set(optimizer.param_groups[0]["params"]), "a part is left"
    run_step(model, optimizer, case, setting, 2)
    assert all(value.isfinite().all() for value in parameters(model).values())
