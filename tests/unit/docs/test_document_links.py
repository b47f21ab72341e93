"""Links between the documents lead somewhere, and the index lists every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.documents import ROOT

from docs.site.hooks import anchor

DOCUMENTS = sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = ("benchmarks", "demo_model", "deploy", "examples", "tests")
PAGES = [*sorted(ROOT.glob("*.md")), *DOCUMENTS, *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)
_CODE = re.compile(r"`[^`\n]+`(?!\])")


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as common renderers make them."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", _FENCED.sub("", page.read_text()))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in _anchors(linked), f"{page.name}: {target}"


def test_the_index_lists_every_page_once_behind_what_readers_want() -> None:
    index = ROOT / "docs" / "README.md"
    text = re.sub(r"^## I want to$.*?(?=^## )", "", index.read_text(), flags=re.M | re.S)
    listed = [(index.parent / target).resolve() for target in _LINK.findall(text)]
    assert sorted(listed) == sorted([ROOT / "README.md", *(page for page in DOCUMENTS if page != index)])
