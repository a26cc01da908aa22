"""Exports are read by safetensors and by from_pretrained, in any dtype and in files of any size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

import shardwise as sw
from tests.kit.checkpoints import Job, train
from tests.kit.oracle import assert_bit_equal

if TYPE_CHECKING:
    from pathlib import Path

TIED = {"head.weight": "embedding.weight"}


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    """Save a trained model and return what an export must hold."""
    started = Job(stage=3).start(seed=1)
    assert started is not None
    train(*started, 1)
    sw.save(folder / "checkpoint", *started)
    return {n: value for n, value in started[0].state_dict().items() if n not in TIED}


@pytest.mark.world_size(2, timeout_s=30)
def test_one_file_holds_every_tensor_once(tmp_path: Path) -> None:
    expected = _saved(tmp_path)
    if dist.get_rank() == 0:
        (file,) = sw.export(tmp_path / "checkpoint", tmp_path / "out")
        assert file.name == "model.safetensors"
        assert_bit_equal(load_file(file), expected)
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt", **TIED}
    dist.barrier()


@pytest.mark.world_size(4, timeout_s=30)
@pytest.mark.parametrize("remainder", [0, 1, 2, 3])
def test_padding_is_no_part_of_an_export(remainder: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Module()
    for name, numel in (("a", 5), ("b", 8 + remainder), ("c", 7)):
        model.register_parameter(name, torch.nn.Parameter(torch.randn(numel)))
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    sw.shard(model, stage=3)
    groups = [{"params": [model.a]}, {"params": [model.b, model.c], "lr": 0.5}]
    sw.save(tmp_path / "checkpoint", model, sw.ShardedOptimizer(torch.optim.SGD(groups, lr=0.1)))
    if dist.get_rank() == 0:
        (file,) = sw.export(tmp_path / "checkpoint", tmp_path / "out")
        assert_bit_equal(load_file(file), expected)
    dist.barrier()


@pytest.mark.world_size(1, timeout_s=30)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_floating_point_tensors_are_cast_as_asked(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = _saved(tmp_path)
    (file,) = sw.export(tmp_path / "checkpoint", tmp_path / "out", dtype=dtype)
    cast = {n: v.to(dtype) if v.is_floating_point() else v for n, v in expected.items()}
    assert_bit_equal(load_file(file), cast)


@pytest.mark.world_size(1, timeout_s=30)
def test_files_are_as_small_as_asked_with_an_index(tmp_path: Path) -> None:
    expected = _saved(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    *files, index = sw.export(tmp_path / "checkpoint", out, max_shard_bytes=150)
    read = json.loads(index.read_text())
    found: dict[str, torch.Tensor] = {}
    for file in files:
        own = load_file(file)
        assert len(own) == 1 or sum(value.nbytes for value in own.values()) <= 150
        assert {read["weight_map"][name] for name in own} == {file.name}
        found |= own
    assert_bit_equal(found, expected)
    assert read["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        index.name,
        *(file.name for file in files),
    }


@pytest.mark.world_size(1, timeout_s=30)
def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    _saved(tmp_path)
    file = tmp_path / "checkpoint" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(sw.CheckpointError, match="__0_0"):
        sw.export(tmp_path / "checkpoint", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.world_size(2, timeout_s=60)
def test_from_pretrained_reads_an_export_and_sharded_models_read_pretrained(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=17, n_positions=9)
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "pretrained")
    dist.barrier()
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "pretrained")
    sw.shard(model, stage=3)
    sw.save(tmp_path / "checkpoint", model)
    if dist.get_rank() == 0:
        config.save_pretrained(tmp_path / "out")
        sw.export(tmp_path / "checkpoint", tmp_path / "out", max_shard_bytes=2000)
        back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
        assert_bit_equal(back.state_dict(), expected)
    dist.barrier()


@pytest.mark.world_size(1, timeout_s=30)
def test_an_export_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    """A reader that finds files of both kinds takes those of one, old or new."""
    expected, out = _saved(tmp_path), tmp_path / "out"
    foreign = {"config.json", "model.safetensors.bak", "adapter_model.safetensors"}
    out.mkdir()
    for name in foreign:
        (out / name).touch()
    for max_shard_bytes in (10**9, 300, 1000, 10**9):
        files = sw.export(tmp_path / "checkpoint", out, max_shard_bytes=max_shard_bytes)
        assert {file.name for file in out.iterdir()} == {file.name for file in files} | foreign
        found = [load_file(file) for file in files if file.suffix == ".safetensors"]
        assert_bit_equal({n: v for one in found for n, v in one.items()}, expected)
