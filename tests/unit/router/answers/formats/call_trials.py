"""Answers that a model whose logits are all the same writes under a format's grammar, and what is read of them."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from support.format_tokens import TOKENS
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from router.answers.formats.events import Arguments, CallEnded, CallStarted, ChatEvent
from router.answers.formats.markers import Markers
from router.answers.formats.reader import AnswerReader
from router.answers.formats.reasoning import named as style_named
from router.answers.formats.schema_types import ArgumentTypes
from router.answers.formats.table import FORMATS
from router.events import Token
from router.grammar.worker import _Bytes, check
from wire.demo_model import __file__ as demo_model
from wire.grammar import compile_grammar

FORMS = [row for row in FORMATS.values() if row.form is not None]
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "n": {"type": "integer", "minimum": -3, "maximum": 99},
            "unit": {"enum": ["C", "F°"]},
            "wet": {"type": "boolean"},
            "share": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
            "at": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 3}, "height": {"type": "integer", "maximum": 9}},
                "required": ["height"],
                "additionalProperties": False,
            },
            "days": {"type": "array", "items": {"enum": ["Mon", "<x>", "日"]}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "files.read_2": {"type": "object", "properties": {"all": {"type": "boolean"}}, "additionalProperties": False},
    "now": None,
}
THINKS = ("<think>", "</think>")
END = "<|the end|>"
MAX_TOKENS = 600
MANY_TOKENS = 4000
"""More than such a model writes under a grammar that ends: each call is followed by another in half of the cases."""


@cache
def tokenizer_of(name: str) -> tuple[Tokenizer, LLTokenizer, Markers]:
    tokenizer = Tokenizer.from_file(str(Path(demo_model).parent / "tokenizer.json"))
    marks = [*FORMATS[name].marks, *THINKS]
    tokenizer.add_special_tokens([END, *(mark for mark in marks if TOKENS.get(mark) is True)])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks if TOKENS.get(mark) is False])
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


def written(
    name: str, matcher: LLMatcher, seed: int, likely: tuple[str, ...] = (), max_tokens: int = MAX_TOKENS
) -> list[int]:
    """What a model whose logits are all the same writes; the `likely` tokens come in one of eight cases."""
    tokenizer, _, _ = tokenizer_of(name)
    chance, matcher, ids = random.Random(seed), matcher.deep_copy(), list[int]()
    end = tokenizer.token_to_id(END)
    while not matcher.is_stopped() and len(ids) < max_tokens:
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
    special = {number for number, one in tokenizer.get_added_tokens_decoder().items() if one.special}
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
