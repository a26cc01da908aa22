"""Plain DCP, FSDP2 and single processes read what shardwise saves, and shardwise reads theirs."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from tests.kit.checkpoints import Job, draw_loss, train, whole_state
from tests.kit.models import CASES
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import assert_same_state

if TYPE_CHECKING:
    from pathlib import Path

GPT = CASES["gpt"]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: Any) -> None:
    loss = GPT.loss(model)
    if isinstance(optimizer, sw.ShardedOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _quietly_load(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)


@pytest.mark.world_size(3, timeout_s=60)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_plain_dcp_reads_full_tensors_under_plain_names(
    stage: int, param_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    job = Job(stage=stage, precision=sw.MixedPrecision(param_dtype=param_dtype))
    started = job.start(seed=1)
    assert started is not None
    model, optimizer = started
    train(model, optimizer, 2)
    sw.save(tmp_path / "checkpoint", model, optimizer)
    exact = whole_state(model, optimizer)["parameters"]
    working = {name: value.clone() for name, value in model.state_dict().items()}
    targets = {name: torch.zeros_like(value) for name, value in working.items()}
    _quietly_load(targets, tmp_path / "checkpoint")
    assert_bit_equal(targets, working)  # tied names, buffers and 16-bit values included
    targets = {name: torch.zeros_like(value) for name, value in exact.items()}
    _quietly_load(targets, tmp_path / "checkpoint")
    assert_bit_equal(targets, exact)


@pytest.mark.world_size(2, timeout_s=60)
def test_a_plain_loop_in_one_process_continues(tmp_path: Path) -> None:
    started = Job(stage=3).start(seed=1)
    assert started is not None
    train(*started, 2)
    sw.save(tmp_path / "checkpoint", *started)
    expected = whole_state(*started)
    model = Job().build()
    optimizer = Job().make_optimizer(model)
    assert sw.load(tmp_path / "checkpoint", model, optimizer) == {}
    assert_bit_equal(dict(model.named_parameters()), expected["parameters"])
    assert_same_state(_filled(optimizer.state_dict()), expected["optimizer"])
    loss = draw_loss(model)
    loss.backward()
    optimizer.step()


def _filled(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict in the order of its indices, as sharded ones have it."""
    return {**state, "state": {i: state["state"][i] for i in sorted(state["state"])}}


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_plain_run_is_taken_over(stage: int, tmp_path: Path) -> None:
    """Every rank holds the plain model, as under DistributedDataParallel; the first one writes."""
    torch.manual_seed(0)
    model = GPT.build()
    optimizer = _adamw(model)
    _step(model, optimizer)
    sw.save(tmp_path / "checkpoint", nn.parallel.DistributedDataParallel(model), optimizer)
    sharded = sw.shard(GPT.build(), stage=stage)
    its_optimizer = sw.ShardedOptimizer(_adamw(sharded))
    sw.load(tmp_path / "checkpoint", sharded, its_optimizer)
    assert_bit_equal(sharded.state_dict(), model.state_dict())
    assert_same_state(its_optimizer.state_dict(), _filled(optimizer.state_dict()))


@pytest.mark.world_size(2, timeout_s=60)
def test_a_run_goes_on_under_ddp(tmp_path: Path) -> None:
    model = sw.shard(GPT.build(), stage=3)
    optimizer = sw.ShardedOptimizer(_adamw(model))
    _step(model, optimizer)
    sw.save(tmp_path / "checkpoint", model, optimizer)
    torch.manual_seed(3)
    plain = GPT.build()
    its_optimizer = _adamw(plain)
    sw.load(tmp_path / "checkpoint", nn.parallel.DistributedDataParallel(plain), its_optimizer)
    assert_bit_equal(plain.state_dict(), model.state_dict())
    assert_same_state(_filled(its_optimizer.state_dict()), optimizer.state_dict())


@pytest.mark.world_size(2, timeout_s=60)
def test_fully_sharded_models_are_sent_to_dcp_and_unchanged(tmp_path: Path) -> None:
    model, optimizer = _sharded(2)
    sw.save(tmp_path / "checkpoint", model, optimizer)
    other, its_optimizer = _fsdp()
    before = _of_fsdp(other, its_optimizer)
    for call in (sw.save, sw.load):
        with pytest.raises(sw.CheckpointError, match=r"torch\.distributed\.checkpoint with"):
            call(tmp_path / "checkpoint", other, its_optimizer)
    assert_bit_equal(_of_fsdp(other, its_optimizer), before)


@pytest.mark.world_size(2, timeout_s=60)
def test_torch_save_files_come_out_of_them(tmp_path: Path) -> None:
    model = sw.shard(GPT.build(), stage=3)
    optimizer = sw.ShardedOptimizer(_adamw(model))
    _step(model, optimizer)
    sw.save(tmp_path / "checkpoint", model, optimizer)
    expected, names = model.state_dict(), [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "plain.pt")
        plain = torch.load(tmp_path / "plain.pt", weights_only=True)
        assert_bit_equal({name: plain[name] for name in expected}, expected)
        for index, name in enumerate(names):
            for key, value in state[index].items():
                assert torch.equal(plain["optimizer"][f"state.{name}.{key}"], value)
        assert plain["optimizer"]["param_groups"][0]["params"] == names
    dist.barrier()


def _fsdp() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(dist.get_world_size())
    model = CASES["gpt-untied"].build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, _adamw(model)


def _sharded(stage: int) -> tuple[nn.Module, sw.ShardedOptimizer]:
    torch.manual_seed(7)
    model = sw.shard(CASES["gpt-untied"].build(), stage=stage)
    return model, sw.ShardedOptimizer(_adamw(model))


def _full(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, dcp.state_dict.DTensor) else value
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _of_fsdp(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return values and state by torchtitan's names."""
    options = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return _full(get_model_state_dict(model)) | _full(options)


def _of_sharded(model: nn.Module, optimizer: sw.ShardedOptimizer) -> dict[str, Tensor]:
    """Return the same of a sharded model."""
    names = [name for name, _ in model.named_parameters()]
    found = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"state.{names[index]}.{key}": value for key, value in state.items()}
    return found


@pytest.mark.world_size(3, timeout_s=60)
@pytest.mark.parametrize("is_flat", [True, False], ids=["torchtitan", "nested"])
@pytest.mark.parametrize("stage", [1, 3])
def test_fully_sharded_models_load_what_shardwise_saved(
    stage: int, is_flat: bool, tmp_path: Path
) -> None:
    model, optimizer = _sharded(stage)
    _step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    sw.save(tmp_path / "checkpoint", model, optimizer)
    other, its_optimizer = _fsdp()
    options = FLAT if is_flat else StateDictOptions()
    states = {
        **get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, its_optimizer, options=options),
    }
    _quietly_load(states, tmp_path / "checkpoint")
    of_optimizer = states.pop("optimizer")
    set_model_state_dict(other, states)
    set_optimizer_state_dict(other, its_optimizer, of_optimizer, options=options)
    assert_bit_equal(_of_fsdp(other, its_optimizer), _of_sharded(model, optimizer))
    assert its_optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.world_size(3, timeout_s=60)
@pytest.mark.parametrize("layout", ["torchtitan", "nested", "two-entries"])
@pytest.mark.parametrize("stage", [1, 3])
def test_shardwise_loads_what_fully_sharded_models_saved(
    stage: int, layout: str, tmp_path: Path
) -> None:
    other, its_optimizer = _fsdp()
    _step(other, its_optimizer)
    its_optimizer.param_groups[0]["lr"] = 0.125
    options = StateDictOptions() if layout == "nested" else FLAT
    of_model = get_model_state_dict(other)
    of_optimizer = get_optimizer_state_dict(other, its_optimizer, options=options)
    state: dict[str, Any] = {**of_model, "optimizer": of_optimizer}
    if layout == "two-entries":
        state = {"model": of_model, "optim": of_optimizer, "train_state": {"step": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint")
    model, optimizer = _sharded(stage)
    assert sw.load(tmp_path / "checkpoint", model, optimizer) == {}
    assert_bit_equal(_of_sharded(model, optimizer), _of_fsdp(other, its_optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.125
