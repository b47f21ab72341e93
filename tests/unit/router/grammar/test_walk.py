"""Grammars within all bounds whose steps take seconds are refused before they reach a shard; ordinary ones are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper
from support.expensive_grammars import ambiguous

from router.grammar.listed import listed
from router.grammar.worker import _Bytes, check

_BYTES = LLTokenizer(TokenizerWrapper(_Bytes()))


@pytest.mark.parametrize("prefix", ["", "Hello, this must come first: "])
def test_an_ambiguous_grammar_is_refused_behind_forced_text_too(prefix: str) -> None:
    text = listed("start: @answer", {"name": "answer", "text_grammar": ambiguous(400, "a-z", prefix)})
    assert check("lark", text, _BYTES).get("fault", "").startswith("a single token takes too much time: ")


_LARGE: list[Any] = [
    {"enum": [f"value {number}" for number in range(1500)]},
    {"type": "object", "properties": {f"p{n}": {"type": ["string", "integer", "null"]} for n in range(300)}},
    {"$defs": {"t": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/t"}, {}]}}}, "$ref": "#/$defs/t"},
]


@pytest.mark.parametrize("schema", _LARGE, ids=["enum", "properties", "recursive"])
def test_large_schemas_are_served(schema: Any) -> None:
    assert "grammar" in check("json", json.dumps(schema), _BYTES)


def test_a_list_of_many_choices_is_served() -> None:
    choices = "|".join(f'"value {number}"' for number in range(1500))
    text = listed("start: @answer", {"name": "answer", "text_grammar": f"start: {choices}"})
    assert "grammar" in check("lark", text, _BYTES)
