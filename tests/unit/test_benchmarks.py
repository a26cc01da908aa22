"""The benchmark runs at a toy size, and its table says what was measured."""

from __future__ import annotations

import pytest

from benchmarks import step_time
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
