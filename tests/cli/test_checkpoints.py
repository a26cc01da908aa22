"""A run that is stopped or killed goes on where its newest good checkpoint is, bit for bit."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import PLAIN, TINY, TORCHRUN, run
from tests.cli.text import make_text

OPTIONS = ("--precision", "fp32", "--validate-every", "0")


def _losses(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {e["step"]: e["loss"] for e in map(json.loads, lines) if e["event"] == "step"}


@pytest.mark.parametrize("ranks", [(), ("--ranks", "2")], ids=["plain", "ranks"])
def test_a_resumed_run_repeats_the_losses_of_the_one_that_went_on(tmp_path, ranks):
    text, out, folder = make_text(tmp_path), tmp_path / "out", tmp_path / "checkpoints"
    command = [*PLAIN, "train", *ranks, *TINY, *OPTIONS, "--data", str(text), "--steps", "8"]
    command += ["--checkpoint-dir", str(folder), "--save-every", "2", "--out", str(out)]
    assert run(command)[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["step-6", "step-8"]
    expected = _losses(out)
    damaged = folder / "step-8" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (out / "metrics.jsonl").unlink()
    code, output, errors = run(command)
    assert code == 0, errors
    assert "continues after step 6" in output
    assert _losses(out) == {step: expected[step] for step in (7, 8)}


def test_a_finished_run_has_nothing_left_to_train(tmp_path):
    text, folder = make_text(tmp_path), tmp_path / "checkpoints"
    command = [*PLAIN, "train", *TINY, *OPTIONS, "--data", str(text), "--steps", "2"]
    command += ["--checkpoint-dir", str(folder)]
    assert run(command)[0] == 0
    code, output, _ = run(command)
    assert code == 0
    assert "Nothing is left to train: 2 steps are done." in output


def test_saving_nowhere_is_refused(tmp_path):
    code, _, errors = run([*PLAIN, "train", *TINY, "--save-every", "3"])
    assert code == 2
    assert "--checkpoint-dir" in errors


@pytest.mark.parametrize("is_elastic", [False, True], ids=["by-hand", "by-torchrun"])
def test_a_job_that_lost_a_rank_goes_on_when_it_is_started_again(is_elastic, tmp_path):
    """A rank is killed once, by itself, after the second checkpoint.

    After torchrun's own restart it comes late, when the other has looked for it already.
    """
    text, folder, out = make_text(tmp_path), tmp_path / "checkpoints", tmp_path / "out"
    script = tmp_path / "victim.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from shardwise.cli.train import loop\n"
        "agree = loop.agree\n"
        f"mark, saved = Path({str(tmp_path / 'mark')!r}), Path({str(folder / 'step-2')!r})\n"
        "def dying(*args, **kwargs):\n"
        "    if os.environ['RANK'] == '1' and saved.exists() and not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return agree(*args, **kwargs)\n"
        "loop.agree = dying\n"
        "from shardwise.cli.main import app\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':\n"
        "    time.sleep(5)\n"
        "app()\n",
        encoding="utf-8",
    )
    restarts = ["--max-restarts", "1"] if is_elastic else []
    torchrun = [*TORCHRUN[: TORCHRUN.index("-m", 3)], *restarts, str(script)]
    options = ["--data", str(text), "--steps", "4", "--out", str(out)]
    saving = ["--checkpoint-dir", str(folder), "--save-every", "1"]
    command = [*torchrun, "train", *TINY, *OPTIONS, *options, *saving]
    code, output, errors = run(command)
    assert (tmp_path / "mark").exists()
    if not is_elastic:
        assert code != 0
        code, output, errors = run(command)
    assert code == 0, errors
    assert "continues after step 2" in output
    assert sorted(_losses(out)) == [1, 2, 3, 4]
