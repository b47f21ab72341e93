"""Numbers with their nouns, in the singular or the plural."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`noun`: in the singular; its plural ends in s. "1 file", "2 files", "0 files"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
