"""The files that CONTRIBUTING.md sends a newcomer to are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# What a command builds below `build` need not be there.
_CODE = re.compile(r"`((?!build/)[^`\s…]+/[^`\s…]*)`")


def _lines() -> list[list[str]]:
    """The paths of each line; below a table's first column, short ones are within the package that it names."""
    found = (_CODE.findall(line) for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines())
    return [paths for paths in found if paths]


@pytest.mark.parametrize("paths", _lines(), ids=lambda paths: paths[0])
def test_every_path_is_there(paths: list[str]) -> None:
    missing = [path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / paths[0]))]
    assert not missing
