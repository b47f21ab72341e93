"""What mkdocs needs to know of our documents: anchors are GitHub's, and the site has only the pages below docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parents[1]

# A link and, as the other way to match, what is shown as it is written: fenced blocks and code.
_LINK = re.compile(r"^```.*?^```|`[^`\n]+`(?!\])|(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)", re.M | re.S)


def anchor(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def inside_the_site(markdown: str, page: str) -> str:
    """The text of `page`, a path below docs/, for readers who see titles, not files.

    A link that shows the name of a page shows its title; one that leads out of docs/ becomes the path.
    """

    def shown(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or "://" in target or target.startswith("#"):
            return match[0]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
        text = match["text"]
        if path.startswith("docs/"):
            return f"[{_title(path)}]({target})" if text.endswith(".md") else match[0]
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _LINK.sub(shown, markdown)


def _title(path: str) -> str:
    return (_DOCS.parent / path).read_text().partition("\n")[0].removeprefix("# ")


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return inside_the_site(markdown, page.file.src_uri)
