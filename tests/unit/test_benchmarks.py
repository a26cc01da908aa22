"""The benchmark runs at a toy size, and its table says what was measured."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks import disk_update, exposed_waiting, host_update, step_time
from benchmarks.results_table import Measurement, make_table


def _measurement(name, steps_s, **changes):
    values = {
        "steps_s": steps_s,
        "sent_bytes": 3 * 2**20,
        "least_sent_bytes": 2 * 2**20,
        "held_bytes": None,
        "peak_bytes": None,
        "loss": 1.5,
    }
    return Measurement(name=name, **{**values, **changes})


def test_ratios_are_taken_round_by_round():
    table = make_table(
        [
            _measurement("DDP", [0.1, 1.0, 0.2]),
            _measurement("other", [0.05, 0.5, 0.4], held_bytes=7 * 2**20),
        ]
    )
    row = table.splitlines()[-1]
    assert row == (
        "| other | **400** (50 - 500) | **0.50** (0.50 - 2.00) | 7 | - | 3 | 2 | 1.5000 |"
    )


def test_a_toy_run_writes_a_table_where_contestants_agree(tmp_path, capsys):
    arguments = ["--tiny", "--rounds", "1", "--steps", "1", "--no-memory"]
    step_time.main([*arguments, "--only", "stage 2", "--out", str(tmp_path)])
    [page] = tmp_path.glob("step_time_tiny_fp32_*.md")
    assert page.read_text() in capsys.readouterr().out
    rows = [line.split(" | ") for line in page.read_text().splitlines() if "**" in line]
    assert [row[0] for row in rows] == ["| DDP", "| shardwise stage 2"]
    losses = [float(row[-1].rstrip(" |")) for row in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_toy_update_is_measured_and_its_bits_compared(capsys, monkeypatch):
    monkeypatch.setattr(host_update, "NUMEL", 1000)
    host_update._measure(torch.float32, 1)
    printed = capsys.readouterr().out
    assert "bits of shardwise are those of AdamW(fused): True" in printed
    assert "shardwise, step" in printed


def test_a_toy_run_says_what_waits(tmp_path, capsys, monkeypatch):
    for name in ("WIDTH", "NUM_LAYERS", "BATCH"):
        monkeypatch.setattr(exposed_waiting, name, 4)
    exposed_waiting._measure(str(tmp_path), 1)
    lines = capsys.readouterr().out.splitlines()
    assert sum("micro-batches: step" in line for line in lines) == 12
    assert all("waiting    0.0 ms" in line for line in lines if line.startswith("not offloaded"))


def test_a_toy_update_on_disk_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(disk_update, "WIDTH", 16)
    monkeypatch.setattr(disk_update, "NUM_LAYERS", 2)
    monkeypatch.setattr(disk_update.Raw, "OPEN_FLAGS", os.O_RDWR | os.O_TMPFILE)
    disk_update._measure(tmp_path, 1)
    assert "shardwise" in capsys.readouterr().out
