"""Patterns with look-ahead, which llguidance refuses, as several patterns without."""

from __future__ import annotations

import re
from typing import Any

_PICTURE = r"[\p{Extended_Pictographic}\p{Emoji_Component}]"
_LOCAL = r"A-Za-z0-9_+\-"
_CLOCK = r"T(?:\d+H(?:\d+M)?(?:\d+([.,]\d+)?S)?|\d+M(?:\d+([.,]\d+)?S)?|\d+([.,]\d+)?S)"
_REWRITTEN = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$":
        rf"^(?:[{_LOCAL}']+\.)*[{_LOCAL}']*[{_LOCAL}]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$":
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_CLOCK})?|{_CLOCK})$",
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])[\p{Extended_Pictographic}\p{Emoji_Component}]+$":
        rf"^{_PICTURE}*[\p{{Extended_Pictographic}}\p{{Regional_Indicator}}\u20E3]{_PICTURE}*$",
}  # fmt: skip
"""zod's for addresses, durations and emoji, whose look-ahead is not at the beginning alone, or excludes."""
_BEGIN = re.compile(r"\^?\(\?=")
_BRACKETS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]", re.DOTALL)


def without_look_ahead(schema: dict[str, Any]) -> dict[str, Any]:
    """Split a text's pattern that begins with what must follow (`^(?=.*[A-Z])`) into parts of `allOf`."""
    pattern, others = schema.get("pattern"), schema.get("allOf", [])
    if not isinstance(pattern, str) or "(?" not in pattern or not isinstance(others, list):
        return schema
    rest, required = _REWRITTEN.get(pattern, pattern), []
    while (found := _BEGIN.match(rest)) and (end := _end(rest, found.end())) is not None:
        begin = "^" if rest[0] == "^" else ""
        required.append({"pattern": f"{begin}(?:{rest[found.end() : end]})"})
        rest = begin + rest[end + 1 :]
    if required and (not rest.startswith("^") or _has_choices(rest)):
        return schema  # each choice and each place has its own
    return schema | {"pattern": rest} | ({"allOf": [*others, *required]} if required else {})


def _end(pattern: str, begin: int) -> int | None:
    """Return where the group ends that is open at `begin`."""
    depth = 1
    for found in _BRACKETS.finditer(pattern, begin):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None


def _has_choices(pattern: str) -> bool:
    """Say whether a pattern is a list of choices."""
    depth, last = 0, 0
    for found in _BRACKETS.finditer(pattern):
        if depth == 0 and "|" in pattern[last : found.start()]:
            return True
        depth, last = depth + {"(": 1, ")": -1}.get(found[0], 0), found.end()
    return depth == 0 and "|" in pattern[last:]
