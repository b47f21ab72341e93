"""`python docs/site/check.py FOLDER` prints what is wrong with a built site; status 1 if anything is.

Links to files and anchors must lead somewhere, and no page may load a script, style, picture or font from elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_STYLE_URL = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
_NOT_FOUND = "404.html"  # its links are absolute: it may be shown at any address


class Page(HTMLParser):
    """The anchors, the links and the loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if "src" in given:
            self.loads.append(given["src"])
        if "href" in given:
            is_shown = tag == "a" or given.get("rel") in ("canonical", "next", "prev")
            (self.links if is_shown else self.loads).append(given["href"])


def complaints(site: Path) -> Iterator[str]:
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no page"
    for path, page in pages.items():
        yield from (f"{path}: loads {url}" for url in page.loads if _is_elsewhere(url))
        if path.name != _NOT_FOUND:
            yield from (
                f"{path}: {url} leads nowhere" for url in (*page.links, *page.loads) if _fails(url, path, pages)
            )
    for style in (*site.rglob("*.css"), *site.rglob("*.svg")):
        yield from (f"{style}: loads {url}" for url in _STYLE_URL.findall(style.read_text()))


def _is_elsewhere(url: str) -> bool:
    return bool(urlsplit(url).netloc)


def _fails(url: str, path: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(url)
    if parts.scheme or parts.netloc:
        return False
    linked = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if linked.is_dir():
        linked /= "index.html"
    anchor = unquote(parts.fragment)
    is_anchor_missing = bool(anchor) and linked in pages and anchor not in pages[linked].anchors
    return not linked.is_file() or is_anchor_missing


def main() -> int:
    said = list(complaints(Path(sys.argv[1])))
    print(*said, sep="\n", end="\n" if said else "")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
