"""Faults that other servers' readers and grammars of calls had, one test for each."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from call_trials import FORMS, THINKS, matcher_of, tokenizer_of
from call_trials import SCHEMAS as TRIAL_SCHEMAS
from support.format_outputs import OUTPUTS, SCHEMAS

from router.answers.formats.choice import ModelFormat
from router.answers.formats.events import Content, Reasoning
from router.answers.formats.format import Format
from router.answers.formats.grammar import Thinking, forced_calls
from router.answers.formats.markers import Markers
from router.answers.formats.reader import AnswerReader
from router.answers.formats.reasoning import STYLES, ReasoningStyle
from router.answers.formats.schema_types import ArgumentTypes
from router.answers.formats.table import FORMATS
from router.answers.reading import CallIds, ChoiceReader, Deltas, message
from router.events import Token

THINK = next(style for style in STYLES if style.name == "think")
ROWS = pytest.mark.parametrize("name", OUTPUTS)
FORCED = pytest.mark.parametrize("format", FORMS, ids=lambda format: format.name)
CALL_IN = {name: next(output for output in outputs if output.calls) for name, outputs in OUTPUTS.items()}


def choice(name: str, *, thinks: bool = False) -> ChoiceReader:
    """A reader that knows all marks by their letters."""
    reader = AnswerReader(
        FORMATS[name], THINK if thinks else None, Markers((), {}), types=ArgumentTypes(SCHEMAS), is_open=thinks
    )
    return ChoiceReader(reader, ())


def streamed(name: str, pieces: list[str], *, thinks: bool = False) -> dict[str, Any]:
    """The message that a client of a stream joins."""
    reader, deltas = choice(name, thinks=thinks), Deltas(CallIds(FORMATS[name].ids, 0))
    tokens = [Token(number, piece, -1.0) for number, piece in enumerate(pieces)]
    events = [event for token in tokens[:-1] for event in deltas.of(reader.push(token))]
    events += deltas.of(reader.finish(tokens[-1]))
    joined: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for delta in events:
        joined["content"] += delta.get("content", "")
        joined["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(joined["calls"]) and call["function"]["arguments"] == ""
                joined["calls"].append([call["id"], call["function"]["name"], ""])
            else:
                assert call["index"] == len(joined["calls"]) - 1
                joined["calls"][-1][2] += call["function"]["arguments"]
    return joined


def calls_in(joined: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for _, name, arguments in joined["calls"]]


@ROWS
@pytest.mark.thinned(3)
@pytest.mark.parametrize("size", [1, 2, 7, 40, 10_000])
def test_no_character_of_arguments_is_lost_or_doubled(name: str, size: int) -> None:
    """However many tokens, or calls, one delta brings."""
    for output in OUTPUTS[name]:
        if any(isinstance(arguments, str) for _, arguments in output.calls):
            continue
        text = output.text or " "
        joined = streamed(name, [text[start : start + size] for start in range(0, len(text), size)])
        assert calls_in(joined) == output.calls


@ROWS
def test_a_stray_mark_leaves_no_brace_too_many(name: str) -> None:
    format, output = FORMATS[name], CALL_IN[name]
    for stray in format.closers if format.turn is None else ():
        if format.starts and not any(opener in output.text for opener in format.openers):
            continue  # it is a call at the beginning of an answer only
        for text in (output.text + stray, output.text + "\n" + stray + "\n"):
            joined = streamed(name, list(text))
            assert calls_in(joined) == output.calls
            assert joined["content"] == output.content


@ROWS
def test_a_mark_that_closes_nothing_is_text(name: str) -> None:
    """Within a text, before calls and behind them; and so is the end of a reasoning that nobody has begun."""
    format = FORMATS[name]
    for stray in (*format.closers, "</think>") if format.turn is None else ():
        for text in (f"Write {stray} so.", stray, f"a{stray}b", f"{stray}\n\nYes {stray}"):
            assert streamed(name, list(text)) == {"content": text, "reasoning": "", "calls": []}
        call = CALL_IN[name].text
        if call.startswith(format.openers):
            joined = streamed(name, list(f"Write {stray} so.\n{call}\nNow {stray} again."))
            assert calls_in(joined) == CALL_IN[name].calls
            assert joined["content"] == f"Write {stray} so.\nNow {stray} again."


def test_a_brace_too_many_is_no_part_of_the_arguments() -> None:
    joined = streamed("hermes", list('<tool_call>\n{"name": "f", "arguments": {"a": {}}}}\n</tool_call>'))
    assert calls_in(joined) == [("f", {"a": {}})]
    twice = streamed("hermes", list('<tool_call>\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'))
    assert calls_in(twice) == [("f", {"a": 1})]


@ROWS
@pytest.mark.thinned(3)
@pytest.mark.parametrize("text", ['[{"', '[{"a": 1}]', '{"a": [{"b": 2}]}', "[1, 2] and {x}", "functools", "["])
def test_json_that_is_no_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert streamed(name, pieces) == {"content": text, "reasoning": "", "calls": []}


@ROWS
def test_no_mark_leaks_into_content_or_reasoning(name: str) -> None:
    """Also where each mark comes cut in two, behind reasoning that the prompt has begun."""
    if FORMATS[name].turn is not None:
        return  # its marks are tokens, and it reads reasoning itself
    marks = [mark for mark in FORMATS[name].openers + FORMATS[name].closers + THINKS if mark]
    chance = random.Random(name)
    for output in OUTPUTS[name]:
        if not output.calls or any(isinstance(arguments, str) for _, arguments in output.calls):
            continue
        for _ in range(5):
            text = "I think.\n</think>\n\n" + output.text
            cuts = sorted({0, len(text), *(chance.randrange(len(text)) for _ in range(12))})
            joined = streamed(name, [text[a:b] for a, b in itertools.pairwise(cuts)], thinks=True)
            assert joined["reasoning"] == "I think." and calls_in(joined) == output.calls
            assert not any(mark in joined["content"] + joined["reasoning"] for mark in marks)


@ROWS
def test_a_call_before_the_end_of_thinking_is_a_call(name: str) -> None:
    output = CALL_IN[name]
    if FORMATS[name].turn is not None or not any(output.text.startswith(mark) for mark in FORMATS[name].openers):
        return  # there is nothing that could begin a call inside of reasoning
    joined = streamed(name, list("I will call it.\n" + output.text + "\n</think>\n\nDone."), thinks=True)
    assert calls_in(joined) == output.calls
    assert (joined["reasoning"], joined["content"]) == ("I will call it.", "Done.")


@ROWS
def test_ids_have_one_form_in_streams_and_whole_answers(name: str) -> None:
    form = {"kimi_k2": r"functions\.\w+:\d+", "mistral_json": "[A-Za-z0-9]{9}", "mistral_args": "[A-Za-z0-9]{9}"}
    pattern = form.get(name, "call_[0-9a-f]{24}")
    for output in OUTPUTS[name]:
        reader = choice(name)
        events = reader.finish(Token(1, output.text, -1.0))
        calls = message(events, CallIds(FORMATS[name].ids, 0)).get("tool_calls", ())
        found = [call["id"] for call in calls], [call[0] for call in streamed(name, list(output.text or " "))["calls"]]
        for ids in found:
            assert len(set(ids)) == len(output.calls) and all(re.fullmatch(pattern, one) for one in ids)


def accepted(name: str, grammar: str, text: str) -> bool:
    tokenizer, _, _ = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    matcher = matcher_of(name, grammar)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


WRITTEN = {
    "harmony": "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}<|call|>",
    "muse_glimmer": ' to=get_time<|message|><atem:function_calls>\n<atem:invoke name="get_time">\n</atem:invoke>\n'
    "</atem:function_calls>",
    "mistral_json": '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]',
    "cohere": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
    "pythonic": "[get_time()]",
    "llama_json": '{"name": "get_time", "parameters": {}}',
}
"""A call as templates write it, of the formats whose outputs have no such one alone."""


@FORCED
def test_a_forced_call_has_the_form_of_the_template(format: Format) -> None:
    """What the template writes for a call is what the grammar demands, from the first token on."""
    _, _, markers = tokenizer_of(format.name)
    schemas = {"get_time": SCHEMAS["get_time"]}
    grammar = forced_calls(format, markers, schemas, Thinking(), is_one=format.is_one)
    alone = (one.text for one in OUTPUTS[format.name] if one.calls == [("get_time", {})] and not one.content)
    text = WRITTEN.get(format.name) or next(alone)
    assert accepted(format.name, grammar, text), text
    assert not accepted(format.name, grammar, '{"function": {"_name": "get_time"}}')


@FORCED
def test_no_grammar_begins_inside_the_thinking(format: Format) -> None:
    tokenizer, _, markers = tokenizer_of(format.name)
    opens, closes = (format.form and format.form.thinks) or ("", "")
    thinking = Thinking(opens=opens or THINKS[0], closes=closes or THINKS[1], is_open=True)
    matcher = matcher_of(format.name, forced_calls(format, markers, TRIAL_SCHEMAS, thinking, is_one=format.is_one))
    thoughts = tokenizer.encode('Say {"a": [1]}\n\nnot "x", </b> then', add_special_tokens=False).ids
    assert matcher.consume_tokens(thoughts) and not matcher.is_accepting()
    assert matcher.consume_tokens(tokenizer.encode(closes or THINKS[1], add_special_tokens=False).ids)
    assert matcher.validate_tokens(thoughts) < len(thoughts)


def read(style: ReasoningStyle, text: str, size: int, **options: Any) -> tuple[str, str]:
    """Reasoning and content of an answer whose marks are text."""
    reader = AnswerReader(None, style, Markers((), {}), types=ArgumentTypes({}), **options)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    events = [event for piece in pieces for event in reader.read(piece)] + reader.end()
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_marks_around_the_answer_are_left_out(style: ReasoningStyle, size: int) -> None:
    begins, ends = style.around_answer
    thought = f"{style.opens}\nHm.\n{style.closes}\n"
    assert read(style, f"{thought}{begins}\nYes, <b>.\n{ends}", size) == ("Hm.", "Yes, <b>." + "\n" * (not ends))
    assert read(style, f"{thought}{begins}Yes", size) == ("Hm.", "Yes")
    assert read(style, f"{begins}Yes{ends if begins else ''}", size) == ("", "Yes")
    assert read(style, f"{thought}Yes{ends if begins else ''}", size) == ("Hm.", f"Yes{ends if begins else ''}")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_marks_of_citations_are_left_out(size: int) -> None:
    style = next(style for style in STYLES if style.name == "cohere")
    text = "<|START_RESPONSE|>It is <co>21 degrees</co: 0:[1]> in <co>Oslo</co: 0:[1,2],1:[0]>.<|END_RESPONSE|>"
    assert read(style, text, size) == ("", "It is 21 degrees in Oslo.")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_an_opening_mark_that_is_repeated_is_left_out(style: ReasoningStyle, size: int) -> None:
    text = f"{style.opens}Hm. {style.closes}Yes"
    assert read(style, text, size, is_open=True) == ("Hm.", "Yes")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_gemmas_thoughts_may_come_behind_text(size: int) -> None:
    style = next(style for style in STYLES if style.name == "gemma4")
    text = "So.<|channel>thought\nHm.<channel|>Yes"
    assert read(style, text, size) == ("Hm.", "So.Yes")


def test_an_answer_that_is_continued_within_its_reasoning() -> None:
    prompt = "user: Hi\nassistant: <think>He asks"
    assert THINK.is_open_in(prompt, "<think>He asks") and not THINK.is_open_in(prompt)
    assert not THINK.is_open_in("<think>a</think>b", "<think>a</think>b")
    assert read(THINK, " me.</think>\n\nYes", 1, is_open=True, is_begun=True) == (" me.", "Yes")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_prompt_may_begin_the_answer_itself(size: int) -> None:
    """Kimi K3's without thinking: the mark that ends it comes alone, and that of the message behind it."""
    style = next(style for style in STYLES if style.name == "kimi_k3")
    assert style.is_answering_in("user<|open|>response<|sep|>") and not THINK.is_answering_in("user")
    text = "Yes. A > b<|close|>response<|sep|><|close|>message<|sep|>"
    assert read(style, text, size, is_answering=True) == ("", "Yes. A > b")
    markers = Markers(style.marks, {mark: number for number, mark in enumerate(("<|open|>", "<|close|>", "<|sep|>"))})
    reader = AnswerReader(None, style, markers, types=ArgumentTypes({}), is_open=True)
    text = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes<|close|>response<|sep|><|close|>message<|sep|> a > b"
    events = [event for one in markers.encoded(text) for event in reader.read(one)] + reader.end()
    content = "".join(event.text for event in events if isinstance(event, Content))
    assert content == "Yesa > b"


def test_a_forced_call_ends_the_answer_that_the_prompt_has_begun() -> None:
    tokenizer, _, markers = tokenizer_of("kimi_k3")
    style = next(style for style in STYLES if style.name == "kimi_k3")
    model = ModelFormat(format=FORMATS["kimi_k3"], style=style, markers=markers)
    call = '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    for prompt, answer in (
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>" + call),
        ("<|open|>think<|sep|>", "Hm.<|close|>think<|sep|>" + call),
    ):
        grammar = model.forced({"now": None}, prompt, is_one=True, budget=None)
        matcher = matcher_of("kimi_k3", grammar.value)
        ids = tokenizer.encode(answer, add_special_tokens=False).ids
        assert matcher.consume_tokens(ids) and matcher.is_accepting()
