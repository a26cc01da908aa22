"""Settings come from defaults, file and command line; every mistake is one line with its path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.cli.train.config import TrainConfig
from shardwise.cli.train.settings import flatten, load, to_toml
from shardwise.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_nothing_given_is_the_defaults():
    assert load(None, {"run.steps": None}) == TrainConfig()


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path):
    file = write(tmp_path, 'model = "medium"\n[run]\nsteps = 7\nbatch = 3\n')
    config = load(file, {"run.batch": 5, "run.steps": None, "shard.stage": 1})
    assert (config.model, config.run.steps, config.run.batch) == ("medium", 7, 5)
    assert config.shard.stage == 1
    assert config.run.seed == TrainConfig().run.seed


def test_written_toml_reads_back_equal(tmp_path):
    options = {
        "data.path": 'a "quoted"\\path\n\u00e9\U0001f600\x7f',
        "optimizer.learning_rate": 1e-05,
        "run.out": "out",
    }
    config = load(None, options)
    assert load(write(tmp_path, to_toml(config)), {}) == config


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("[run]\nstepz = 3\n", "run.stepz", "did you mean run.steps"),
        ("steps = 3\n", "steps", "known are data, model, optimizer, run, shard"),
        ("[run]\nsteps = 0\n", "run.steps", "greater than or equal to 1 but got 0"),
        ("[run]\nsteps = true\n", "run.steps", "valid integer but got true"),
        ('[run]\nsteps = "3"\n', "run.steps", 'valid integer but got "3"'),
        ("[shard]\nstage = 7\n", "shard.stage", "0, 1, 2 or 3 but got 7"),
        ('[optimizer]\nlearning_rate = "fast"\n', "optimizer.learning_rate", 'but got "fast"'),
        ("[optimizer]\nlearning_rate = nan\n", "optimizer.learning_rate", "NaN"),
        ("[data]\nvalidation_fraction = 1.0\n", "data.validation_fraction", "less than 1"),
        ("run = 1\n", "run", "but got 1"),
        ("[run]\nseed = 2026-01-01\n", "run.seed", "2026-01-01"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_its_path(tmp_path, text, path, said):
    file = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        load(file, {})
    message = str(caught.value)
    assert message.startswith(f"{path} in {file} ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"run.batch": 0}, "--batch"),
        ({"shard.stage": 4}, "--stage"),
        ({"shard.precision": "fp8"}, "--precision"),
        ({"model": "huge"}, "--model"),
        ({"optimizer.clip_grad_norm": -1.0}, "--clip-grad-norm"),
        ({"data.sequence": 1}, "--sequence"),
    ],
)
def test_a_mistake_in_an_option_names_the_option(options, flag):
    with pytest.raises(ConfigurationError, match=rf"^{flag} expected .* but got .*\.$"):
        load(None, options)


def test_a_file_that_is_no_toml_or_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="--config expected TOML"):
        load(write(tmp_path, "[run"), {})
    with pytest.raises(ConfigurationError, match="--config expected a readable file"):
        load(tmp_path / "absent.toml", {})


def test_the_command_refuses_bad_input_in_one_line_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = tmp_path / "out"
    wrong = [
        ["--stage", "7"],
        ["--data", str(tmp_path / "absent")],
        ["--batch", "0"],
        ["--sequence", "100000000"],
        ["--shard-size", "2"],
    ]
    for options in wrong:
        result = CliRunner().invoke(app, ["train", *options])
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("shardwise train: ")
        assert result.stderr.count("\n") == 1
    assert not out.exists()


def test_every_default_in_the_help_is_the_default():
    shown = " ".join(CliRunner().invoke(app, ["train", "--help"]).output.replace("│", " ").split())
    defaults = flatten(TrainConfig())
    for path in ("shard.stage", "run.steps", "run.batch", "data.sequence", "run.validate_every"):
        assert f"[default: ({defaults[path]})]" in shown, path
    assert f"[default: ({defaults['optimizer.learning_rate']})]" in shown
    assert f"[default: ({defaults['model']})]" in shown
