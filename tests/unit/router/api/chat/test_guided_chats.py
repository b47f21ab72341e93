"""Constraints in the words of vLLM and SGLang on OpenAI's routes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper
from router_fakes import Router, is_invalid, message_of

from router.answers.formats.choice import ModelFormat
from router.answers.formats.markers import Markers
from router.answers.formats.reasoning import named as style_named
from router.grammar.worker import _Bytes
from wire.grammar import compile_grammar

MakeRouter = Callable[..., Router]

PATH, TEXTS = "/v1/chat/completions", "/v1/completions"
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


LARK = 'start: ("yes" | "no") ", \\"<b>\\" @ $END " NUMBER // <c>\nNUMBER: /[0-9]+|<d>/'
EBNF = 'root ::= ("yes" | "no") ", \\"<b>\\" @ $END " number # <c>\nnumber ::= [0-9]+ | "<d>"'


GRAMMARS: list[dict[str, Any]] = [
    {"guided_grammar": EBNF},
    {"guided_grammar": LARK},
    {"structured_outputs": {"grammar": EBNF}},
    {"ebnf": EBNF},
    {"response_format": {"type": "lark", "value": LARK}},
    {"response_format": {"type": "gbnf", "value": EBNF}},
    {"response_format": {"type": "ebnf", "value": EBNF}},
]


@pytest.mark.parametrize("path", [PATH, TEXTS])
async def test_a_grammar_in_lark_or_ebnf(make_router: MakeRouter, path: str) -> None:
    router = make_router()
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    for fields in GRAMMARS:
        asked = body() if path == PATH else {"prompt": "Hello"}
        answer = await router.post(path, asked | fields)
        assert answer.status_code == 200, answer.text
        sampling = router.scheduler.last.sampling
        assert sampling.grammar_kind == "lark"
        matcher = compile_grammar("lark", sampling.grammar, tokenizer, (256,))
        for text in ('yes, "<b>" @ $END 12', 'no, "<b>" @ $END <d>'):
            at = matcher.deep_copy()
            assert all(at.consume_token(byte) for byte in text.encode()) and at.is_accepting()
        for wrong in ("maybe", 'yes, "<b>" @ $END x', "yes"):
            at = matcher.deep_copy()
            assert not (all(at.consume_token(byte) for byte in wrong.encode()) and at.is_accepting())


async def test_a_choice_begins_behind_the_thinking(make_router: MakeRouter) -> None:
    style = style_named("think")
    chosen = ModelFormat(style=style, markers=Markers(("<think>", "</think>"), {"<think>": 257, "</think>": 258}))
    for asked, text in (({"guided_choice": ["yes", "no"]}, "yes"), ({"ebnf": EBNF}, 'no, "<b>" @ $END 1')):
        router = make_router(model_format=chosen)
        assert (await router.post(PATH, body(**asked))).status_code == 200
        sampling = router.scheduler.last.sampling
        matcher = compile_grammar("lark", sampling.grammar, LLTokenizer(TokenizerWrapper(_Bytes())), (256,))
        for thinks in (True, False):
            at = matcher.deep_copy()
            if thinks:
                assert all(map(at.consume_token, [257, *b"maybe", 258, *b"\n\n"]))
            assert not at.is_accepting() and all(map(at.consume_token, text.encode())) and at.is_accepting()
        for first in (b"m", b"\n", b" "):
            assert not matcher.deep_copy().consume_token(first[0])  # white space would be part of the answer


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "more than one of"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "more than one of"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "more than one of"),
    ({"guided_grammar": "x"}, "the EBNF cannot be read"),
    ({"guided_grammar": "root ::= " + "(" * 2000}, "nested too deeply"),
    ({"ebnf": 'start: "a" <[7]>'}, "it names the token <[7]>"),
    ({"ebnf": 'start: "a" </s>'}, "it names the token </s>"),
    ({"ebnf": "start: @frame"}, "it refers to another grammar: @frame"),
    ({"ebnf": "start: other"}, "grammar is not valid"),
    ({"ebnf": "root ::= root root"}, "no text fits it"),
    ({"response_format": {"type": "gbnf"}}, "must be a string that is not empty"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "more than one of"),
    ({"guided_whitespace_pattern": " "}, "`guided_whitespace_pattern` is not served here"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "`whitespace_pattern` is not served here"),
    ({"structured_outputs": {"structural_tag": "x"}}, "`structural_tag` is not served here"),
    ({"guided_choice": []}, "at least one text"),
]


async def test_what_is_refused(make_router: MakeRouter) -> None:
    router = make_router()
    for fields, says_so in REFUSED:
        answer = await router.post(PATH, body(**fields))
        assert is_invalid(answer) and says_so in message_of(answer), (fields, answer.text)
