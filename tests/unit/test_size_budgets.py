"""The size budgets see what is too long and nothing else."""

from __future__ import annotations

import pytest

from scripts import size_budgets


def _lines(num_lines, indent="    "):
    return "".join(f"{indent}x = {i}\n" for i in range(num_lines))


def _whats(source, path="src/shardwise/some.py"):
    return [(excess.name, excess.what) for excess in size_budgets.find_excess(path, source)]


def test_a_file_at_its_budget_passes_and_one_line_more_does_not():
    assert _whats(_lines(400, "")) == []
    assert _whats(_lines(401, "")) == [("", "401 lines, budget 400")]


@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_function_is_counted_with_its_signature_and_without_its_docstring(keyword):
    docstring = '    """One.\n\n    Two.\n    """\n'
    assert _whats(f"{keyword} f():\n{docstring}{_lines(59)}") == []
    assert _whats(f"{keyword} f():\n{docstring}{_lines(60)}") == [
        ("f", "function of 61 lines, budget 60")
    ]


def test_nested_parts_are_seen_under_their_qualified_name():
    source = f"class A:\n  class B:\n    def f(self):\n{_lines(60, '      ')}"
    assert _whats(source) == [("A.B.f", "function of 61 lines, budget 60")]


def test_a_class_is_counted_whole():
    assert _whats(f"class A:\n{_lines(349)}") == []
    assert _whats(f"class A:\n{_lines(350)}") == [("A", "class of 351 lines, budget 350")]


def _class_with_parameters(num_parameters, name="A"):
    parameters = ", ".join(f"p{i}" for i in range(num_parameters))
    return f"class {name}:\n    def __init__(self, subject, *, {parameters}): ...\n"


def test_a_constructor_may_have_eight_parameters_beyond_its_subject():
    assert _whats(_class_with_parameters(8)) == []
    [(name, what)] = _whats(_class_with_parameters(9))
    assert name == "A.__init__"
    assert what == "constructor with 9 parameters beyond the subject, budget 8"


def test_exceptions_are_by_path_and_name():
    source = _class_with_parameters(20, "ShardedOptimizer")
    assert _whats(source, "src/shardwise/optimizer.py") == []
    assert _whats(source, "src/shardwise/optimizer/face.py") == []
    assert len(_whats(source, "src/shardwise/runtime/face.py")) == 1
