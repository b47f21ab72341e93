"""Constraints in vLLM's words on the chat route."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper
from router_fakes import Router

from router.grammar.worker import _Bytes
from wire.grammar import compile_grammar

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
CHOICES = ["yes", "no (never)", "a|b", "c:\\d", "50% #1"]


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}]} | fields


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"guided_json": SCHEMA}, "json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json"),
        ({"guided_regex": "[0-9]{3}"}, "regex"),
        ({"structured_outputs": {"json": SCHEMA}}, "json"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "regex"),
        ({"structured_outputs": {"json_object": True}}, "json"),
        ({"structured_outputs": {}}, "none"),
        ({"guided_regex": "[0-9]{3}", "response_format": {"type": "text"}}, "regex"),
    ],
)
async def test_the_constraint_reaches_the_shards(router: Router, fields: dict[str, Any], kind: str) -> None:
    answer = await router.post(PATH, body(**fields))
    assert answer.status_code == 200, answer.text
    sampling = router.scheduler.last.sampling
    assert sampling.grammar_kind == kind
    if "[0-9]{3}" in str(fields):
        assert sampling.grammar == "[0-9]{3}"
    elif kind == "json" and "json_object" not in str(fields):
        assert json.loads(sampling.grammar) == SCHEMA


@pytest.mark.parametrize("name", ["guided_choice", "structured_outputs"])
async def test_a_choice_is_one_of_the_texts_as_they_are(router: Router, name: str) -> None:
    given = CHOICES if name == "guided_choice" else {"choice": CHOICES}
    answer = await router.post(PATH, body(**{name: given}))
    assert answer.status_code == 200, answer.text
    sampling = router.scheduler.last.sampling
    assert sampling.grammar_kind == "regex"
    matcher = compile_grammar("regex", sampling.grammar, LLTokenizer(TokenizerWrapper(_Bytes())), ())
    for text in CHOICES:
        at = matcher.deep_copy()
        assert all(at.consume_token(byte) for byte in text.encode()) and at.is_accepting()
    for wrong in ("a", "no never", "yesno", "maybe"):
        at = matcher.deep_copy()
        assert not (all(at.consume_token(byte) for byte in wrong.encode()) and at.is_accepting())


@pytest.mark.parametrize(
    ("fields", "says_so"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "more than one of"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "more than one of"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "more than one of"),
        ({"structured_outputs": {"grammar": "x"}}, "`grammar` is not served here"),
        ({"structured_outputs": {"structural_tag": "x"}}, "`structural_tag` is not served here"),
        ({"guided_choice": []}, "at least one text"),
        ({"guided_regex": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "mutually exclusive"),
    ],
)
async def test_what_is_refused(router: Router, fields: dict[str, Any], says_so: str) -> None:
    answer = await router.post(PATH, body(**fields))
    assert answer.status_code == 422 and says_so in answer.json()["error"]
