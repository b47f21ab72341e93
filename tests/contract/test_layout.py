"""The layout of the source keeps its measures: small files. CONTRIBUTING.md says which."""

from __future__ import annotations

import statistics
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
MOST_LINES, MEDIAN_LINES = 400, 150
GENERATED = (SOURCE / "wire" / "v3", SOURCE / "wire" / "node" / "v1")


def _files() -> list[Path]:
    """Every module that somebody wrote by hand."""
    return [path for path in SOURCE.rglob("*.py") if path.parent not in GENERATED]


def test_files_are_small() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in _files()}
    assert {str(path.relative_to(SOURCE)): n for path, n in lengths.items() if n > MOST_LINES} == {}
    assert statistics.median(lengths.values()) < MEDIAN_LINES
