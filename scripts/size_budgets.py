"""Check that no file, class, function or constructor has grown over its budget.

What separates code that stays readable from code that does not is its longest parts, not the
average; so the longest parts have a limit, and whoever needs an exception names it here with a
reason. Reads the sources only, imports nothing of them.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FILE_LINES = 400
MAX_CLASS_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_PARAMETERS = 8

FOLDERS = ("src", "tests", "benchmarks", "scripts")

EXCEPTIONS: dict[str, str] = {
    "src/shardwise/optimizer*::ShardedOptimizer.__init__": "public face, signature given",
    "src/shardwise/compat/*.__init__": "the signatures of the library whose names it offers",
}
"""Pattern over `path::qualified name` (`*` matches anything) -> the reason."""

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Excess:
    """One part of the sources that is over its budget."""

    path: str
    line: int
    name: str
    """Qualified name inside the file; empty for the file itself."""
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name or 'file'}: {self.what}"

    @property
    def is_excepted(self) -> bool:
        """Whether EXCEPTIONS names it."""
        return any(fnmatchcase(f"{self.path}::{self.name}", pattern) for pattern in EXCEPTIONS)


def find_excess(path: str, source: str) -> list[Excess]:
    """Return everything in one file that is over its budget and not excepted."""
    found = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        found.append(Excess(path, 1, "", f"{num_lines} lines, budget {MAX_FILE_LINES}"))
    for name, node in _definitions(ast.parse(source, path)):
        found += [Excess(path, node.lineno, name, what) for what in _judge(node)]
    return [excess for excess in found if not excess.is_excepted]


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Function | ast.ClassDef]]:
    """Walk all classes and functions, nested ones too, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}" if prefix else node.name
            yield name, node
        yield from _definitions(node, name)


def _judge(node: _Function | ast.ClassDef) -> Iterator[str]:
    """Say how one class or function is over its budget."""
    num_lines = _count_lines(node)
    if isinstance(node, ast.ClassDef):
        if num_lines > MAX_CLASS_LINES:
            yield f"class of {num_lines} lines, budget {MAX_CLASS_LINES}"
        return
    if num_lines > MAX_FUNCTION_LINES:
        yield f"function of {num_lines} lines, budget {MAX_FUNCTION_LINES}"
    if node.name == "__init__":
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        num_parameters = len(named) - 2  # beyond self and the subject
        if num_parameters > MAX_CONSTRUCTOR_PARAMETERS:
            yield (
                f"constructor with {num_parameters} parameters beyond the subject, "
                f"budget {MAX_CONSTRUCTOR_PARAMETERS}"
            )


def _count_lines(node: _Function | ast.ClassDef) -> int:
    """Count the lines of a definition, a function's docstring not counted."""
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if isinstance(node, ast.ClassDef) or ast.get_docstring(node) is None:
        return num_lines
    docstring = node.body[0]
    return num_lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def main() -> int:
    """Check the repository; print what is over its budget and return how many."""
    root = Path(__file__).resolve().parent.parent
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    found = [
        excess
        for path in paths
        for excess in find_excess(path.relative_to(root).as_posix(), path.read_text())
    ]
    for excess in found:
        print(excess)
    print(f"{len(paths)} files, {len(found)} parts over their budget")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
