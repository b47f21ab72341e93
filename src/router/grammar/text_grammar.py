"""Clients' grammars as text: llguidance's Lark, or llama.cpp's GBNF."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
"""Parts of a Lark grammar that may hold any character: literals, regular expressions, comments."""
_TOKEN = re.compile(r"<[^\s<>]*>")
_REFERENCE = re.compile(r"@\w+")


def lark_of(text: str) -> str:
    """Convert to Lark, without the model's tokens."""
    try:
        lark: str = any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the reader has a class of its own for some faults, and `Exception` for others
        raise ValueError(f"the EBNF cannot be read: {error}") from None
    rest = _TEXTS.sub("", lark)
    if found := _TOKEN.search(rest):
        raise ValueError(f"it names the token {found[0]}: texts are in quotation marks, tokens cannot be named")
    if found := _REFERENCE.search(rest):
        raise ValueError(f"it refers to another grammar: {found[0]}")
    return lark


def lark_of_regex(pattern: str) -> str:
    """A regular expression as a Lark grammar."""
    grammar: str = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return grammar
