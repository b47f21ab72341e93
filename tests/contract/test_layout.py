"""The layout of the source keeps its measures: small files, small packages. CONTRIBUTING.md says why."""

from __future__ import annotations

import statistics
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
MOST_LINES, MEDIAN_LINES, MOST_FILES = 400, 150, 12
GENERATED = (SOURCE / "wire" / "v3", SOURCE / "wire" / "node" / "v1")


def _files() -> list[Path]:
    """Every module that somebody wrote by hand."""
    return [path for path in SOURCE.rglob("*.py") if path.parent not in GENERATED]


def test_files_are_small() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in _files()}
    assert {str(path.relative_to(SOURCE)): n for path, n in lengths.items() if n > MOST_LINES} == {}
    assert statistics.median(lengths.values()) < MEDIAN_LINES


def test_packages_have_few_files_of_their_own() -> None:
    packages = {path.parent for path in _files()}
    counts = {str(package.relative_to(SOURCE)): len(list(package.glob("*.py"))) for package in packages}
    assert {package: n for package, n in counts.items() if n > MOST_FILES} == {}
