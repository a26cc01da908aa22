"""Every example of docs/checkpoints.md runs as it stands, and twice: the second run continues."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_the_page_on_checkpoints_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, flags = PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags)
    assert len(blocks) >= 8
    steps: list[int] = []
    for _ in range(2):
        monkeypatch.chdir(tmp_path)
        torch.manual_seed(0)
        names: dict[str, Any] = {"__name__": "page"}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch")  # of dcp, about its own calls
            for block in blocks:
                exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - our own page
                dist.barrier()
        steps.append(names["extra"]["step"])
        assert torch.equal(names["plain"].state_dict()["0.weight"], names["weights"]["0.weight"])
    assert steps == [3, 3]
    assert (tmp_path / "exported" / "model.safetensors").exists()
