"""The whole command, as a person runs it: files, table, Ctrl-C, exit codes."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cli.train.settings import load
from tests.cli.command import PLAIN, TIMEOUT_S, TINY, TORCHRUN, run, start
from tests.cli.text import make_text


def events(folder, kind):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.parametrize("launcher", [TORCHRUN, PLAIN], ids=["torchrun", "ranks"])
def test_two_ranks_train_prove_parity_and_report(tmp_path, launcher):
    text, out = make_text(tmp_path), tmp_path / "out"
    ranks = ("--ranks", "2") if launcher is PLAIN else ()
    options = ("--data", str(text), "--out", str(out), "--steps", "6", "--check-parity", "4")
    code, output, errors = run([*launcher, "train", *ranks, *TINY, *options, "--precision", "fp32"])
    assert code == 0, errors
    assert output.count("holds: ") == 2
    assert "bit-equal" in output
    assert output.count("optimizer state") == 1  # rank 0 alone speaks
    steps = events(out, "step")
    assert [event["step"] for event in steps] == list(range(1, 7))
    assert all(math.isfinite(event["loss"]) for event in steps)
    assert all(event["tokens"] == 2 * 2 * 64 for event in steps)
    assert events(out, "parity")[0]["is_bit_equal"] is True
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["validation_loss"] == events(out, "validation")[-1]["loss"]
    for row in summary["memory"]:
        assert row["measured_bytes"] <= 1.01 * row["closed_form_bytes"] + 1024, row
    assert summary["memory"][-1]["measured_bytes"] < 0.7 * summary["memory"][-1]["plain_bytes"]
    assert "| total |" in (out / "report.md").read_text(encoding="utf-8")
    assert load(out / "config.toml", {}).run.steps == 6


def test_a_toml_file_sets_a_run_and_options_override_it(tmp_path):
    text, out = make_text(tmp_path), tmp_path / "out"
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "tiny"\n[data]\npath = "{text}"\nsequence = 64\n'
        f'[run]\nsteps = 50\nbatch = 2\nsample_bytes = 0\nout = "{out}"\n',
        encoding="utf-8",
    )
    code, output, errors = run([*PLAIN, "train", "--config", str(file), "--steps", "3"])
    assert code == 0, errors
    assert "sample" not in output
    assert len(events(out, "step")) == 3


def train_on(tmp_path, *ranks):
    """Start to train, and return when it does."""
    text, out = make_text(tmp_path), tmp_path / "out"
    options = ("--data", str(text), "--out", str(out), "--steps", "100000")
    save = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    process = start([*PLAIN, "train", *ranks, *TINY, *options, *save])
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        metrics = out / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    except BaseException:
        process.kill()
        raise
    return process, out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ranks", [(), ("--ranks", "2")], ids=["plain", "ranks"])
def test_a_signal_finishes_the_step_saves_and_reports(tmp_path, ranks, number):
    process, out = train_on(tmp_path, *ranks)
    try:
        process.send_signal(number)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in output + errors
    assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}" in output
    assert "closed form" in output
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["is_interrupted"] is True
    assert summary["num_steps"] == len(events(out, "step"))
    newest = sw.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{summary['num_steps']}"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a process")
def test_ranks_end_with_a_launcher_that_was_killed(tmp_path):
    process, _ = train_on(tmp_path, "--ranks", "2")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8")
    ranks = [Path("/proc", child) for child in children.split()]
    assert len(ranks) >= 2
    process.kill()
    process.communicate()
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(rank.exists() for rank in ranks):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_bad_input_is_refused_once_before_any_rank_starts(tmp_path):
    code, output, errors = run([*PLAIN, "train", "--ranks", "2", "--data", str(tmp_path / "no")])
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert errors.startswith("shardwise train: --data expected")


@pytest.mark.parametrize("ranks", [(), ("--ranks", "2")], ids=["plain", "ranks"])
def test_a_device_that_is_not_there_is_refused(tmp_path, monkeypatch, ranks):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text, out = make_text(tmp_path), tmp_path / "out"
    options = ("--data", str(text), "--out", str(out), "--steps", "1", "--device", "cuda")
    code, output, errors = run([*PLAIN, "train", *ranks, *TINY, *options])
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert errors.startswith("shardwise train: --device expected")
    assert not out.exists()


def test_what_only_the_ranks_can_refuse_ends_with_the_code_for_bad_input(tmp_path):
    text = make_text(tmp_path)
    code, _, errors = run(
        [*PLAIN, "train", "--ranks", "2", "--shard-size", "3", "--data", str(text), *TINY]
    )
    assert code == 2
    assert errors.count("shardwise train: ") == 1
    assert "Traceback" not in errors


def test_what_rests_elsewhere_is_in_the_table_and_a_path_alone_is_refused(tmp_path):
    text = make_text(tmp_path)
    options = ("train", *TINY, "--data", str(text), "--steps", "2", "--stage", "3")
    place = ("--offload-path", str(tmp_path))
    code, output, errors = run(
        [*PLAIN, *options, "--offload-optimizer", "1", "--offload-parameters", "0.5", *place]
    )
    assert code == 0, errors
    assert "at rest on disk" in output
    code, _, errors = run([*PLAIN, *options, *place])
    assert code == 2
    assert "--offload-optimizer" in errors
