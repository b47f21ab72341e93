"""CHANGELOG.md is cut into versions: what is not released, then releases; the newest is that of pyproject.toml."""

from __future__ import annotations

import re
import tomllib

from packaging.version import Version
from support.documents import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text()
HEADINGS = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)


def test_releases_have_versions_and_dates_newest_first() -> None:
    assert HEADINGS[0] == "Unreleased"
    releases = [re.fullmatch(r"(\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2})\)", heading) for heading in HEADINGS[1:]]
    found = [(Version(match[1]), match[2]) for match in releases if match]
    assert found and len(found) == len(releases)
    assert found == sorted(found, reverse=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert found[0][0] == Version(version), "the newest release is the version of pyproject.toml"


def test_no_version_has_a_section_twice() -> None:
    for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert len(sections) == len(set(sections))
