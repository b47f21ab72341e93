"""Patterns of files and requests."""

from __future__ import annotations

import regex

# Matching may take memory without end; neither JSON Schema nor Python's `re` has such patterns.
_RECURSION = regex.compile(r"(?<!\\)(?:\\\\)*\(\?(?:R\)|&|P>|[+-]?\d)")


def calls_itself(pattern: str) -> bool:
    return _RECURSION.search(pattern) is not None
