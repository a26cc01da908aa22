"""``shardwise train`` within budgets: as exact as without, and it says what each tier has held."""

from __future__ import annotations

import json
import re

from tests.cli.command import PLAIN, TINY, run
from tests.cli.text import make_text


def test_a_run_with_budgets_is_exact_and_ends_with_its_tiers(tmp_path) -> None:
    text = make_text(tmp_path)
    options = ("train", *TINY, "--data", str(text), "--steps", "3", "--stage", "3")
    budgets = ("--accelerator-budget", "2MiB", "--host-budget", "1MiB")
    losses = []
    for number, more in enumerate([(), budgets]):
        out = tmp_path / f"out{number}"
        exact = ("--ranks", "2", "--precision", "fp32", "--check-parity", "2")
        code, output, errors = run([*PLAIN, *options, *exact, *more, "--out", str(out)])
        assert code == 0, errors
        summary = json.loads((out / "summary.json").read_text())
        losses.append((summary["first_loss"], summary["last_loss"], summary["validation_loss"]))
        assert all(parity["has_passed"] for parity in summary["parity"])
    assert losses[0] == losses[1]
    assert "high-water mark" in output
    assert "times the accelerator's budget" in re.sub(r"\s+", " ", output)
    assert [row["limit_bytes"] for row in summary["tiers"]] == [2 * 2**20, 2**20]
    for row in summary["tiers"]:
        assert 0 < row["peak_bytes"] <= row["limit_bytes"]


def test_a_budget_that_cannot_work_is_one_line_with_the_number_that_would(tmp_path) -> None:
    text = make_text(tmp_path)
    command = [*PLAIN, "train", *TINY, "--data", str(text), "--steps", "2", "--stage", "3"]
    code, _, errors = run([*command, "--accelerator-budget", "1KiB"])
    assert code == 2
    assert len(errors.strip().splitlines()) == 1
    found = re.search(r"raise Budget.accelerator to (\d+) bytes", errors)
    assert found is not None
    code, _, errors = run([*command, "--accelerator-budget", "1MiB", "--offload-optimizer", "1"])
    assert code == 2
    assert "budgets or fractions" in errors


def test_a_run_ends_well_though_the_whole_model_does_not_fit(tmp_path) -> None:
    """The text that a model writes at the end takes all of its parameters."""
    size = ("--model", "medium", "--batch", "1", "--sequence", "16", "--precision", "fp32")
    command = [*PLAIN, "train", *size, "--data", str(make_text(tmp_path)), "--steps", "2"]
    budgets = ("--stage", "3", "--accelerator-budget", "17MiB", "--ranks", "2")
    code, output, errors = run([*command, *budgets])
    assert code == 0, errors
    assert "no sample" in output
    assert "high-water mark" in output
