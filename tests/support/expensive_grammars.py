"""Grammars within all bounds of llguidance whose masks take seconds."""

from __future__ import annotations


def ambiguous(count: int, letters: str, prefix: str = "") -> str:
    """In Lark: each of `count` rules may stand beside each other, behind a text that leaves no choice."""
    rules = [f"s{number}: s s{(number + 1) % count} | T" for number in range(count)]
    start = f'start: "{prefix}" s' if prefix else "start: s"
    return "\n".join([start, "s: " + "|".join(f"s{number}" for number in range(count)), *rules, f"T: /[{letters}]/"])
