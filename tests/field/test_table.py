"""The table in README.md: complete, and every test that it names exists."""

import ast
import pathlib
import re

import pytest

HERE = pathlib.Path(__file__).parent
IDS = {"A": 19, "B": 10, "C": 10, "D": 13, "E": 9, "I": 8, "J": 12, "K": 7, "L": 11, "M": 5, "N": 6}
ROWS = dict(re.findall(r"^\| ([A-N]\d+) \| (.*) \|$", (HERE / "README.md").read_text(), re.MULTILINE))


def test_every_report_has_a_row():
    assert set(ROWS) == {f"{kind}{n}" for kind, last in IDS.items() for n in range(1, last + 1)} | {"G8"}


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row):
    file, named = None, 0
    for name, test in re.findall(r"`([\w./]*?)(?:::(test_\w+))?`", ROWS[row]):
        file = (HERE / name).resolve() if name.endswith(".py") else file
        if (not name and test) or name.endswith(".py"):
            functions = {n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)}
            assert test in functions | {""}, f"{file.name}::{test}"
            named += 1
    assert named or re.match(r"as [A-N]\d+", ROWS[row])
