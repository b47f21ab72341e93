"""The table of rows and tests tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| ([ABL]\d+) \| .+ \| (.+) \|$", (ROOT / "tests/e2e/README.md").read_text(), flags=re.M)


def test_no_row_is_missing() -> None:
    expected = [f"L{n}" for n in range(1, 17)] + [f"A{n}" for n in range(1, 12)] + [f"B{n}" for n in range(1, 6)]
    assert [row for row, _ in ROWS] == expected


@pytest.mark.parametrize(("row", "tests"), ROWS, ids=[row for row, _ in ROWS])
def test_the_tests_of_a_row_exist(row: str, tests: str) -> None:
    for name in re.findall(r"`([^`]+)`", tests):
        path, _, function = name.partition("::")
        text = (ROOT / path).read_text()
        assert re.search(rf"def {function}\(" if function else "def test_", text), name
