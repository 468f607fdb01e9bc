"""Every report of docs/reports.md has its tests, and every mark its line there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reports.md"
NUMBER = re.compile(r"#\d+|@[0-9a-f]{7}")


def is_mark(node):
    """``@pytest.mark.report(...)``, or ``@report(...)`` where that name is short."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == (
        "report"
    )


def marked():
    """``{report: names of tests}``, as decorators have it."""
    found = {}
    for path in TESTS.glob("test_*.py"):
        for function in ast.parse(path.read_text()).body:
            for mark in getattr(function, "decorator_list", []):
                if is_mark(mark):
                    test = f"{path.name}::{function.name}"
                    for argument in mark.args:
                        found.setdefault(ast.literal_eval(argument), set()).add(test)
    return found


def told():
    """``{report: names of tests}``, as the page's tables have it."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and "`test_" in cells[3]:
            for name in cells[0].split(", "):
                assert name not in found, f"{name} has two lines"
                found[name] = set(re.findall(r"`(test_\w+\.py::test_\w+)`", cells[3]))
    return found


def test_the_page_and_the_marks_tell_the_same():
    assert told() == marked()


def test_forty_numbered_reports_are_tests():
    assert len([name for name in marked() if NUMBER.search(name)]) >= 40
