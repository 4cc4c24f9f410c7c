"""No long functions and no long files, in what is shipped and in scripts; no two tests of one name."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = {"function": 80, "file": 500}


def too_long(name: str, text: str) -> set[str]:
    """`name` where the file is too long, and `name: function` of each function that is, decorators counted."""
    found = {name} if len(text.splitlines()) > MOST_LINES["file"] else set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            assert node.end_lineno is not None
            if node.end_lineno - first + 1 > MOST_LINES["function"]:
                found.add(f"{name}: {node.name}")
    return found


def test_functions_and_files_are_short():
    found: set[str] = set()
    for folder in ("swa_jax", "pallas_kernels", "launch", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            found |= too_long(file.relative_to(ROOT).as_posix(), file.read_text())
    assert found == set(), "cut it into functions, or files by job"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n" + "    x = 1\n" * 79, set()),
        ("@d\ndef f():\n" + "    x = 1\n" * 79, {"a.py: f"}),
        ("class C:\n    async def g(self):\n" + "        x = 1\n" * 80, {"a.py: g"}),
        ("x = 1\n" * 500, set()),
        ("x = 1\n" * 501, {"a.py"}),
    ],
)
def test_what_is_too_long(text, expected):
    assert too_long("a.py", text) == expected


def test_no_two_test_files_have_one_name():
    """pytest refuses the second of them, but only where one process collects both."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
