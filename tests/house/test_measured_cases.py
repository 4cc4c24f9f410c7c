"""`tests/slow_cases.txt` and `tests/long_cases.txt` name tests that exist: one that has another name now would be quick
again without a word."""

import ast
from pathlib import Path

from tests.conftest import CASES

ROOT = Path(__file__).parents[2]


def test_every_case_is_a_test():
    functions = {}
    for case in CASES["slow"] | CASES["long"]:
        file, _, test = case.partition("::")
        if file not in functions:
            tree = ast.parse((ROOT / file).read_text())
            functions[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test.partition("[")[0] in functions[file], case


def test_a_case_is_listed_once():
    assert not CASES["slow"] & CASES["long"]
