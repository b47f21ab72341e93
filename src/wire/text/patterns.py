"""Patterns of files and requests."""

from __future__ import annotations

import re

# What means nothing here (an escape, a class of characters), or a call of a group, perhaps with blanks in it, or the
# flag that lets blanks and comments be anywhere. Matching calls may take memory without end; neither JSON Schema nor
# Python's `re` has them.
_CALL = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(\(\?\s*(?:R\s*\)|&|P\s*>|[+-]?\d|[a-zA-Z]*x[a-zA-Z]*[-:)]))", re.DOTALL
)


def calls_itself(pattern: str) -> bool:
    """Whether a pattern has, or may hide, a call of one of its groups."""
    return any(found[1] is not None for found in _CALL.finditer(pattern))
