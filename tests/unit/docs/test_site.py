"""What `make docs` builds: its navigation, and links that lead out of docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.documents import ROOT

from docs.site.check import complaints
from docs.site.hooks import anchor, inside_the_site


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(entry)


def test_the_navigation_lists_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    docs = ROOT / "docs"
    assert sorted(_pages(nav)) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("a.md", "see [b](b.md#c)", "see [b](b.md#c)"),
        ("reference/a.md", "[b](../b.md)", "[b](../b.md)"),
        ("reference/a.md", "[scaling.md](../scaling.md#x)", "[Scaling](../scaling.md#x)"),
        ("a.md", "[peers](../benchmarks/peers/README.md#x)", "`benchmarks/peers/README.md`"),
        ("a.md", "[What I ran](../benchmarks/run.json)", "What I ran (`benchmarks/run.json`)"),
        ("reference/a.md", "[`Makefile`](../../Makefile)", "`Makefile`"),
        ("a.md", "[x](https://example.org/y) [z](#z)", "[x](https://example.org/y) [z](#z)"),
        ("a.md", "![p](images/p.png)", "![p](images/p.png)"),
        ("a.md", "```\n[b](../b)\n```", "```\n[b](../b)\n```"),
        ("a.md", "`[b](../b)`", "`[b](../b)`"),
    ],
)
def test_links_are_as_the_site_needs_them(page: str, written: str, shown: str) -> None:
    assert inside_the_site(written, page) == shown


def test_every_picture_is_shown_and_loads_no_font() -> None:
    docs = ROOT / "docs"
    shown = {name for page in docs.rglob("*.md") for name in re.findall(r"!\[[^]]+\]\((.+?)\)", page.read_text())}
    assert shown == {str(picture.relative_to(docs)) for picture in (docs / "images").iterdir()}
    assert not [picture for picture in (docs / "images").glob("*.svg") if 'url("http' in picture.read_text()]


def test_anchors_are_those_of_github() -> None:
    assert anchor("What is refused, and what to do instead") == "what-is-refused-and-what-to-do-instead"
    assert anchor("`GET /`: the page") == "get--the-page"


def _site(folder: Path, page: str, style: str = "") -> list[str]:
    (folder / "b.html").write_text('<h1 id="top">B</h1>')
    (folder / "style.css").write_text(style)
    (folder / "a.html").write_text(page)
    return list(complaints(folder))


@pytest.mark.parametrize(
    "page",
    [
        '<a href="b.html#top">b</a> <a href="#here" id="here">a</a> <link rel="stylesheet" href="style.css">',
        '<a href="https://example.org/">elsewhere</a> <img src="data:image/png;base64,AA">',
    ],
)
def test_a_good_page_has_no_complaint(tmp_path: Path, page: str) -> None:
    assert _site(tmp_path, page) == []


@pytest.mark.parametrize(
    ("page", "style", "complaint"),
    [
        ('<a href="c.html">c</a>', "", "c.html leads nowhere"),
        ('<a href="b.html#bottom">b</a>', "", "b.html#bottom leads nowhere"),
        ('<img src="c.png">', "", "c.png leads nowhere"),
        ('<script src="https://example.org/x.js"></script>', "", "loads https://example.org/x.js"),
        ('<link rel="preconnect" href="//fonts.example.org">', "", "loads //fonts.example.org"),
        ("", "@import 'https://example.org/x.css';", "loads https://example.org/x.css"),
        ("", "p { background: url(//example.org/x.png) }", "loads //example.org/x.png"),
    ],
)
def test_a_bad_page_is_named(tmp_path: Path, page: str, style: str, complaint: str) -> None:
    (found,) = _site(tmp_path, page, style)
    assert found.endswith(complaint)


def test_a_folder_without_pages_is_not_a_site(tmp_path: Path) -> None:
    assert list(complaints(tmp_path)) == [f"{tmp_path}: no page"]
