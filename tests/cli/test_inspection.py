"""A checkpoint is shown as it is, sound or damaged, and exported."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import shardwise as sw
from shardwise.cli.main import app

RUNNER = CliRunner()


def _save(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    sw.save(folder / "step-3", model, optimizer, extra={"step": 3})
    return model


def test_a_sound_checkpoint_is_shown_as_a_tree(tmp_path):
    _save(tmp_path)
    result = RUNNER.invoke(app, ["inspect", str(tmp_path / "step-3")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for words in (
        "step 3",
        "written by 1 rank(s)",
        "verified: every file matches its hash",
        "model: 144 B in 2 tensors",
        "weight  9 x 4  float32  144 B",
        "weight  tied to 0.weight",
        "exp_avg  9 x 4  float32  144 B",
        "step  scalar  float32  4 B",
    ):
        assert words in result.output, words


def test_programs_read_it_as_json(tmp_path):
    _save(tmp_path)
    result = RUNNER.invoke(app, ["inspect", str(tmp_path / "step-3"), "--json"])
    read = json.loads(result.output)
    assert read["is_verified"]
    assert read["step"] == 3
    assert [one["name"] for one in read["tensors"]["model"]] == ["0.weight", "1.weight"]


def test_damage_is_shown_and_is_an_exit_code(tmp_path):
    _save(tmp_path)
    path = tmp_path / "step-3" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    result = RUNNER.invoke(app, ["inspect", str(tmp_path / "step-3")], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "DAMAGED" in result.output
    assert "__0_0.distcp" in result.output


def test_no_checkpoint_is_bad_input(tmp_path):
    result = RUNNER.invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 2
    assert "manifest.json" in result.output


def test_weights_are_exported_in_the_dtype_asked_for(tmp_path):
    model = _save(tmp_path)
    arguments = ["export", str(tmp_path / "step-3"), str(tmp_path / "out"), "--dtype", "bf16"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(read["0.weight"], model[0].weight.bfloat16())
    assert RUNNER.invoke(app, [*arguments[:-1], "int3"]).exit_code == 2
