"""The scripts on the page for people who come from that library run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardwise.compat import colossalai

PAGE = Path(__file__).parents[3] / "docs" / "colossalai.md"


def test_the_scripts_of_the_page_run(capsys: Any) -> None:
    scripts = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        exec(compile(script, PAGE.name, "exec"), {})  # noqa: S102 - what a reader would run
    assert "'cpu':" in capsys.readouterr().out


def test_every_name_is_on_the_page() -> None:
    text = PAGE.read_text()
    small = {"OrderedParamGenerator", "PlacementPolicyFactory"}
    assert [name for name in colossalai.__all__ if name not in text] == sorted(small)
