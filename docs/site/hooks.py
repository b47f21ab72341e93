"""What mkdocs needs to know of our documents: anchors are GitHub's, and the site has only the pages below docs/."""

from __future__ import annotations

import posixpath
import re
from typing import Any

# A link and, as the other way to match, what is shown as it is written: fenced blocks and code.
_LINK = re.compile(r"^```.*?^```|`[^`\n]+`(?!\])|(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)", re.M | re.S)


def anchor(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def inside_the_site(markdown: str, page: str) -> str:
    """The text of `page`, a path below docs/, with the path instead of a link where the link leads out of docs/."""

    def shown(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or "://" in target or target.startswith("#"):
            return match[0]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
        if path.startswith("docs/"):
            return match[0]
        text = match["text"]
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _LINK.sub(shown, markdown)


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return inside_the_site(markdown, page.file.src_uri)
