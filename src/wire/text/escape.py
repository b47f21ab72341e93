"""Text made safe to show, once, where it leaves a process."""

from __future__ import annotations

import re

MOST_BYTES = 8 * 1024
"""Of one error: more than any message of ours, few enough for a terminal."""

# C0 but tab and newline, DEL, C1, line separators, the marks that reorder text on screen, lone surrogates.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

_BEFORE_HOST = re.compile(r"""(?<=://)[^/?#\s]*@|[^\s/?#'"=@:]+:[^\s/?#'"@]*@""")


def escape(text: str) -> str:
    """Control characters but tab and newline as `\\x1b`-like escapes."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Escape newlines too."""
    return escape(text).replace("\n", "\\n")


def without_passwords(text: str) -> str:
    """Hide the part of an address before its host, which may hold a password."""
    return _BEFORE_HOST.sub("<hidden>@", text)


def shown(text: str, most_bytes: int = MOST_BYTES) -> str:
    """Escape and cut, before as well: escapes are longer, and long texts slow."""
    return cut(escape(cut(text, most_bytes)), most_bytes)


def shown_in_line(text: str) -> str:
    """Escape and cut for one line."""
    return cut(one_line(cut(text, MOST_BYTES)), MOST_BYTES)


def as_error(text: str) -> str:
    """The one line that a terminal shows of an error."""
    return "error: " + shown_in_line(text.replace("`", ""))


def quoted(text: str) -> str:
    """Quote in one line, as Rust's `{:?}` in TGI's last line."""
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{shown_in_line(inner)}"'


def cut(text: str, most_bytes: int) -> str:
    """At most about `most_bytes` of UTF-8, and how many there were."""
    if len(text) * 4 <= most_bytes:
        return text
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= most_bytes:
        return text
    return f"{encoded[:most_bytes].decode('utf-8', 'ignore')}... ({len(encoded)} bytes)"
