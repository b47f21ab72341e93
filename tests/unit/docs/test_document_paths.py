"""The files that the documents name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.documents import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_PATH = re.compile(r"`([\w./-]+/[\w.-]+(?:\.(?:py|hpp|cpp|proto|toml|yaml)|/))`")
_TOP = (".github", "benchmarks", "demo_model", "deploy", "docker", "docs", "examples", "proto", "src", "tests")
_THERE = [
    f"/{path.relative_to(ROOT)}" + ("/" if path.is_dir() else "")
    for name in _TOP
    for path in (ROOT / name, *(ROOT / name).rglob("*"))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """A page may leave out the beginning of a path."""
    named = set(_PATH.findall(page.read_text()))
    assert {path for path in named if not any(file.endswith(f"/{path}") for file in _THERE)} == set()
