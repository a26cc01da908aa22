"""From a TOML file and the command line to a checked ``TrainConfig``, and back to TOML.

The command line wins over the file. Every mistake is one line that names where it was made.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from shardwise.cli.train.config import TrainConfig
from shardwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pydantic_core import ErrorDetails


def load(file: Path | None, options: Mapping[str, object]) -> TrainConfig:
    """Read the file, lay the command line over it, check everything.

    Args:
        file: A TOML file with the sections of ``TrainConfig``, or None.
        options: What the command line gave, by dotted path (``"run.batch"``); a value of None
            means that the option was not given.

    Returns:
        The checked configuration.

    Raises:
        ConfigurationError: A mistake in the file or in an option; one line, with the exact path.
    """
    given = {path: value for path, value in options.items() if value is not None}
    tree = {} if file is None else _read_toml(file)
    for path, value in given.items():
        _put(tree, path, value)
    try:
        # JSON is where pydantic's strict mode takes objects for dataclasses, so "3" is no number
        # and true is no count.
        return TypeAdapter(TrainConfig).validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigurationError(_explain(error.errors()[0], file, given)) from None


def to_toml(config: TrainConfig) -> str:
    """Write a configuration as the TOML that ``load`` reads back to an equal one."""
    lines: list[str] = []
    sections: list[str] = []
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            entries = [_toml_line(key, entry) for key, entry in value.items() if entry is not None]
            sections.append("\n".join([f"[{name}]", *entries]))
        else:
            lines.append(_toml_line(name, value))
    return "\n\n".join(["\n".join(lines), *sections]) + "\n"


def flatten(config: TrainConfig) -> dict[str, object]:
    """Return the configuration as ``{"run.batch": 16, ...}``."""
    flat: dict[str, object] = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": entry for key, entry in value.items()})
        else:
            flat[name] = value
    return flat


def _read_toml(file: Path) -> dict[str, Any]:
    """Parse a TOML file, or say in one line why not."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigurationError(
            f"--config expected a readable file but got {file}: {reason}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config expected TOML but {file} is not: {error}.") from None


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    """Set one dotted path; a section of a wrong type is left for the check to name."""
    *sections, key = path.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if not isinstance(inner, dict):
            return
        tree = inner
    tree[key] = value


def _explain(detail: ErrorDetails, file: Path | None, given: Mapping[str, object]) -> str:
    """Word the first mistake: where, what was expected, what was got."""
    path = ".".join(str(part) for part in detail["loc"])
    where = option_name(path) if path in given else f"{path} in {file}"
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where} is not a known key; {_nearest(path)}."
    expected = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{where} expected {expected} but got {json.dumps(detail['input'], default=str)}."


def option_name(path: str) -> str:
    """Return the command line's spelling of a dotted path: ``run.batch`` is ``--batch``."""
    return "--data" if path == "data.path" else "--" + path.split(".")[-1].replace("_", "-")


def _nearest(path: str) -> str:
    """Name the known key that was probably meant, else the known keys of that section."""
    *sections, key = path.split(".")
    known = list(flatten(TrainConfig()))
    prefix = ".".join(sections)
    if prefix:
        names = [name.removeprefix(prefix + ".") for name in known if name.startswith(prefix + ".")]
    else:
        names = sorted({name.split(".")[0] for name in known})
    if close := difflib.get_close_matches(key, names, n=1):
        return f"did you mean {'.'.join([*sections, close[0]])}"
    return f"known are {', '.join(names)}"


def _toml_line(key: str, value: object) -> str:
    """One ``key = value`` line; what JSON writes is TOML, but for the character DEL."""
    return f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
