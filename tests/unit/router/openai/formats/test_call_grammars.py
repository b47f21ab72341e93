"""What any model writes under the grammar of a format is read as calls that fit their schemas."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from router.events import Token
from router.grammar.worker import _Bytes, check
from router.openai.formats.events import Arguments, CallEnded, CallStarted, ChatEvent, Content, Reasoning
from router.openai.formats.format import Format
from router.openai.formats.grammar import Thinking, answer_behind, forced_calls, free_calls, is_suitable
from router.openai.formats.markers import Markers
from router.openai.formats.reader import AnswerReader
from router.openai.formats.reasoning import named as style_named
from router.openai.formats.schema_types import ArgumentTypes
from router.openai.formats.table import FORMATS
from wire.demo_model import __file__ as demo_model
from wire.grammar import compile_grammar

FORMS = [row for row in FORMATS.values() if row.form is not None]
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "n": {"type": "integer", "minimum": -3, "maximum": 99},
            "days": {"type": "array", "items": {"enum": ["Mon", "<x>", "日"]}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "files.read-2": {"type": "object", "properties": {"all": {"type": "boolean"}}, "additionalProperties": False},
    "now": None,
}
THINKS = ("<think>", "</think>")
END = "<|the end|>"
MAX_TOKENS = 600
SAMPLES = pytest.mark.parametrize("num_samples", [10, pytest.param(100, marks=pytest.mark.long)])


@cache
def tokenizer_of(name: str) -> tuple[Tokenizer, LLTokenizer, Markers]:
    tokenizer = Tokenizer.from_file(str(Path(demo_model).parent / "tokenizer.json"))
    marks = [*FORMATS[name].marks, *THINKS]
    tokenizer.add_special_tokens([END, *(mark for mark in marks if mark != "functools")])
    vocabulary = LLTokenizer(
        tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[tokenizer.token_to_id(END)]
    )
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    return tokenizer, vocabulary, Markers(marks, added)


def matcher_of(name: str, grammar: str) -> LLMatcher:
    tokenizer, vocabulary, _ = tokenizer_of(name)
    outcome = check("lark", grammar, LLTokenizer(TokenizerWrapper(_Bytes())))
    assert "fault" not in outcome, outcome
    matcher = compile_grammar("lark", outcome["grammar"], vocabulary, [tokenizer.token_to_id(END)])
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def written(name: str, matcher: LLMatcher, seed: int, likely: tuple[str, ...] = ()) -> list[int]:
    """What a model whose logits are all the same writes; the `likely` tokens come in one of eight cases."""
    tokenizer, _, _ = tokenizer_of(name)
    chance, matcher, ids = random.Random(seed), matcher.deep_copy(), list[int]()
    end = tokenizer.token_to_id(END)
    while not matcher.is_stopped() and len(ids) < MAX_TOKENS:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, matcher.get_error()
        preferred = [one for text in likely if (one := tokenizer.token_to_id(text)) in allowed]
        chosen = chance.choice(preferred if preferred and chance.random() < 1 / 8 else allowed)
        if chosen == end:
            break
        assert matcher.consume_token(chosen), matcher.get_error()
        ids.append(chosen)
    return ids


def read(name: str, ids: list[int], *, style: str | None = None, is_open: bool = False) -> list[ChatEvent]:
    tokenizer, _, markers = tokenizer_of(name)
    special = set(tokenizer.get_added_tokens_decoder())
    types = ArgumentTypes({function: schema or {} for function, schema in SCHEMAS.items()})
    chosen = style_named(style) if style else None
    reader = AnswerReader(FORMATS[name], chosen, markers, types=types, is_open=is_open)
    events: list[ChatEvent] = []
    text = DecodeStream(skip_special_tokens=False)
    for one in ids:
        token = Token(one, text.step(tokenizer, one) or "", np.float32(-1), one in special)
        events += reader.read(reader.text_of(token))
    return events + reader.end()


def calls_of(events: list[ChatEvent]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStarted):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return calls


def check_calls(events: list[ChatEvent]) -> int:
    calls = calls_of(events)
    assert all(event.is_complete for event in events if isinstance(event, CallEnded))
    for function, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[function] or {"type": "object", "maxProperties": 0})
    return len(calls)


@SAMPLES
@pytest.mark.parametrize("format", FORMS, ids=lambda format: format.name)
def test_demanded_calls_fit_their_schemas(format: Format, num_samples: int) -> None:
    _, _, markers = tokenizer_of(format.name)
    opens, closes = (format.form and format.form.thinks) or ("", "")
    thinking = Thinking(opens=opens or THINKS[0], closes=closes or THINKS[1], budget=20)
    matcher = matcher_of(format.name, forced_calls(format, markers, SCHEMAS, thinking, is_one=format.is_one))
    style = None if opens else "think"
    numbers = []
    for seed in range(num_samples):
        ids = written(format.name, matcher, seed, likely=(closes or THINKS[1],))
        assert len(ids) < MAX_TOKENS
        events = read(format.name, ids, style=style)
        assert not any(isinstance(event, Content) for event in events)
        numbers.append(check_calls(events))
    assert min(numbers) >= 1 and (max(numbers) == 1) == format.is_one


@SAMPLES
@pytest.mark.parametrize("format", FORMS, ids=lambda format: format.name)
def test_under_noise_no_mark_is_content(format: Format, num_samples: int) -> None:
    _, _, markers = tokenizer_of(format.name)
    grammar = free_calls(format, markers, SCHEMAS, is_one=False)
    if grammar is None:
        assert format.name in ("llama_json", "phi4_mini", "harmony")
        return
    matcher = matcher_of(format.name, grammar)
    num_calls = 0
    for seed in range(num_samples):
        ids = written(format.name, matcher, seed, likely=(*format.openers, END))
        events = read(format.name, ids)
        content = "".join(event.text for event in events if isinstance(event, Content))
        opener = markers.visible(markers.encoded(format.openers[0]))
        assert opener not in content
        num_calls += check_calls(events) if len(ids) < MAX_TOKENS else 0
    assert num_calls > num_samples / 10


@pytest.mark.parametrize("is_open", [True, False])
def test_an_answer_behind_thinking_fits_its_schema(is_open: bool) -> None:
    _, _, markers = tokenizer_of("hermes")
    thinking = Thinking(opens=THINKS[0], closes=THINKS[1], is_open=is_open, budget=5)
    matcher = matcher_of("hermes", answer_behind(thinking, markers, SCHEMAS["get_weather"]))
    for seed in range(20):
        events = read("hermes", written("hermes", matcher, seed), style="think", is_open=is_open)
        jsonschema.validate(
            json.loads("".join(event.text for event in events if isinstance(event, Content))), SCHEMAS["get_weather"]
        )
        assert sum(isinstance(event, Reasoning) for event in events) <= 6


def test_a_budget_ends_thinking() -> None:
    tokenizer, _, markers = tokenizer_of("hermes")
    thinking = Thinking(opens=THINKS[0], closes=THINKS[1], is_open=True, budget=3)
    matcher = matcher_of("hermes", forced_calls(FORMATS["hermes"], markers, SCHEMAS, thinking, is_one=True))
    for _ in range(3):
        assert matcher.consume_token(tokenizer.token_to_id("."))
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert mask == 1 << tokenizer.token_to_id(THINKS[1])


def test_a_token_that_does_not_fit_is_refused() -> None:
    tokenizer, _, markers = tokenizer_of("hermes")
    start = matcher_of("hermes", forced_calls(FORMATS["hermes"], markers, SCHEMAS, Thinking(), is_one=False))
    good = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": []}}\n</tool_call>'
    ids = tokenizer.encode(good, add_special_tokens=False).ids
    assert start.deep_copy().validate_tokens(ids) == len(ids)
    for wrong in (
        good.replace("get_weather", "get_other"), good.replace('"city"', '"town"'), good.replace('"Rome"', "3"),
        good.replace('"Rome"', '"a long name"'), good.replace("arguments", "parameters"), "Hello" + good,
    ):  # fmt: skip
        ids = tokenizer.encode(wrong, add_special_tokens=False).ids
        assert start.deep_copy().validate_tokens(ids) < len(ids)


def test_names_that_no_frame_can_hold() -> None:
    assert is_suitable(["get_weather", "mcp__a.b/c-1", "名前"])
    for name in ('a"b', "a b", "<|x|>", "a\\b", "a(b)", ""):
        assert not is_suitable([name])
