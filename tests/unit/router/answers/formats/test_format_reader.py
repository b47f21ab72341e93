"""Each format's outputs, whole and in pieces: the same message comes out, and no character is lost or doubled."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.format_outputs import OUTPUTS, SCHEMAS, Output

from router.answers.formats.events import Arguments, CallEnded, CallStarted, ChatEvent, Content, Reasoning
from router.answers.formats.markers import Markers
from router.answers.formats.reader import AnswerReader, merged
from router.answers.formats.reasoning import STYLES
from router.answers.formats.schema_types import ArgumentTypes
from router.answers.formats.table import FORMATS
from router.events import Token

THINK = next(style for style in STYLES if style.name == "think")
CASES = [(name, number) for name, outputs in OUTPUTS.items() for number in range(len(outputs))]


def reader_of(name: str | None, markers: Markers, *, thinks: bool = False, is_open: bool = False) -> AnswerReader:
    format = FORMATS[name] if name else None
    return AnswerReader(format, THINK if thinks else None, markers, types=ArgumentTypes(SCHEMAS), is_open=is_open)


def marks_of(name: str) -> list[str]:
    return [mark for mark in FORMATS[name].marks if mark.isprintable()]


def markers_of(name: str, *, as_tokens: bool) -> Markers:
    marks = [*marks_of(name), "<think>", "</think>"]
    return Markers(marks, {mark: number for number, mark in enumerate(marks)} if as_tokens else {})


def read(reader: AnswerReader, pieces: Sequence[str]) -> list[ChatEvent]:
    events = [event for piece in pieces for event in reader.read(piece)]
    return merged(events + reader.end())


def message_of(events: list[ChatEvent]) -> tuple[str, str, list[tuple[str, str]]]:
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStarted):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, reasoning, calls


def check(events: list[ChatEvent], output: Output) -> None:
    content, reasoning, calls = message_of(events)
    assert content == output.content
    assert reasoning == output.reasoning
    assert [name for name, _ in calls] == [name for name, _ in output.calls]
    for (_, text), (_, arguments) in zip(calls, output.calls, strict=True):
        assert (text if isinstance(arguments, str) else json.loads(text)) == arguments
    is_complete = [event.is_complete for event in events if isinstance(event, CallEnded)]
    assert is_complete == [not isinstance(arguments, str) for _, arguments in output.calls]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("as_tokens", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize(("name", "number"), CASES)
def test_an_output_is_its_message_however_it_is_cut(name: str, number: int, as_tokens: bool) -> None:
    output, markers = OUTPUTS[name][number], markers_of(name, as_tokens=as_tokens)
    text = markers.encoded(output.text)
    whole = read(reader_of(name, markers), [text])
    check(whole, output)
    assert read(reader_of(name, markers), list(text)) == whole
    chosen = random.Random(number)
    for _ in range(6):
        cuts = sorted(chosen.randrange(len(text) + 1) for _ in range(chosen.randrange(1, 8)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(reader_of(name, markers), pieces) == whole


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_beginning_of_an_output_is_read(name: str) -> None:
    """Of an answer that is cut anywhere: never an error, and nothing but marks and white space is missing."""
    markers = markers_of(name, as_tokens=True)
    for output in OUTPUTS[name]:
        text = markers.encoded(output.text)
        for end in range(0, len(text), 5):
            whole = read(reader_of(name, markers), [text[:end]])
            assert read(reader_of(name, markers), list(text[:end])) == whole
            content, _, calls = message_of(whole)
            assert output.content.strip().startswith(content.strip()) or len(calls) < len(output.calls)


@pytest.mark.random
@given(data=st.data())
def test_noise_gives_the_same_events_in_any_pieces(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([None, *OUTPUTS]))
    marks = marks_of(name) if name else []
    markers = markers_of(name, as_tokens=data.draw(st.booleans())) if name else Markers((), {})
    part = st.sampled_from(
        [*marks, "<think>", "</think>", "f", '{"name": "get_time"', "}", "]", "\n", " ", '"', "a\\", "call:"]
    )
    text = "".join(map(markers.encoded, data.draw(st.lists(part, max_size=12))))
    is_open = data.draw(st.booleans())
    whole = read(reader_of(name, markers, thinks=True, is_open=is_open), [text])
    assert read(reader_of(name, markers, thinks=True, is_open=is_open), list(text)) == whole


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_text_between_calls_is_read_alike_in_any_pieces(name: str) -> None:
    """Where what closes a call begins the next one, too."""
    call = next(one.text for one in OUTPUTS[name] if one.calls and one.is_usual)
    for as_tokens in (False, True):
        markers = markers_of(name, as_tokens=as_tokens)
        text = markers.encoded(f"{call}\n\nDone.{call} Done.")
        assert read(reader_of(name, markers), list(text)) == read(reader_of(name, markers), [text])


@given(text=st.text("ab \n<think>/{}", max_size=40))
def test_without_marks_an_answer_is_its_content(text: str) -> None:
    markers = Markers((), {})
    expected = [Content(text)] if text else []
    assert read(AnswerReader(None, None, markers, types=ArgumentTypes({})), list(text)) == expected


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes. ", False, "Hm.", "Yes. "),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("Hm. It", True, "Hm. It", ""),
        ("\n\n</think>\n\nYes.", True, "", "Yes."),
        ("Yes: <think> is a tag", False, "", "Yes: <think> is a tag"),
        ("\n<think>a</think>b <think>c", False, "a", "b <think>c"),
        ("Yes. ", False, "", "Yes. "),
    ],
)
def test_reasoning(text: str, is_open: bool, reasoning: str, content: str) -> None:
    markers = Markers((), {})
    for pieces in ([text], list(text)):
        found = message_of(read(reader_of(None, markers, thinks=True, is_open=is_open), pieces))
        assert found == (content, reasoning, [])


def test_a_call_in_unfinished_reasoning_ends_it() -> None:
    text = 'I call.\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n</think>\nDone.'
    markers = markers_of("hermes", as_tokens=True)
    events = read(reader_of("hermes", markers, thinks=True, is_open=True), list(markers.encoded(text)))
    assert message_of(events) == ("Done.", "I call.", [("get_time", "{}")])


def test_the_letters_of_a_mark_that_is_a_token_are_text() -> None:
    text = 'Write <tool_call>{"name": "f"}</tool_call> so.'
    events = read(reader_of("hermes", markers_of("hermes", as_tokens=True)), list(text))
    assert events == [Content(text)]


@pytest.mark.parametrize("name", OUTPUTS)
def test_marks_that_are_special_tokens_are_never_shown(name: str) -> None:
    """Noise of marks and words, with calls that break: the words come out, and no mark does."""
    marks = [*marks_of(name), "<think>", "</think>"]
    markers = Markers(marks, {mark: number for number, mark in enumerate(marks)}, marks)
    for seed in range(60):
        chosen = random.Random(f"{name} {seed}")
        words = [chosen.choice([*marks, "one ", "two", '{"a', "f(", "\n"]) for _ in range(chosen.randrange(1, 12))]
        for is_open in (False, True):
            reader = reader_of(name, markers, thinks=FORMATS[name].turn is None, is_open=is_open)
            content, reasoning, calls = message_of(read(reader, [markers.encoded(word) for word in words]))
            shown = content + reasoning + "".join(name + arguments for name, arguments in calls)
            assert not any(mark in shown for mark in marks), (words, shown)


def test_tokens_become_text_and_marks() -> None:
    markers = Markers(["<tool_call>", "<a>"], {"<tool_call>": 7, "</s>": 8})
    tokens = [
        Token(1, "é<tool_call>", -1.0), Token(7, "�<tool_call>", -1.0), Token(8, "</s>", -1.0, special=True),
        Token(7, "<tool_call>", -1.0, special=True),
    ]  # fmt: skip
    mark = markers.encoded("<tool_call>")
    assert [markers.text_of(token) for token in tokens] == ["é<tool_call>", "�" + mark, "", mark]
    assert markers.visible(mark + "x") == "<tool_call>x"


def test_arguments_without_quotes_have_the_type_of_the_schema() -> None:
    properties: dict[str, Any] = {
        "text": {"type": "string"},
        "maybe": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/text"}]},
        "one": {"enum": ["1", "2"]},
        "spaced": {"$ref": "#/$defs/a%20text"},
    }
    texts = {"text": {"type": "string"}, "a text": {"type": "string"}}
    types = ArgumentTypes({"f": {"properties": properties, "$defs": texts}})
    written = {
        ("text", "5"): '"5"', ("maybe", "null"): "null", ("maybe", "x"): '"x"', ("maybe", "1.5"): '"1.5"',
        ("either", "5"): "5", ("either", "five"): '"five"', ("one", "1"): '"1"', ("other", "[1]"): "[1]",
        ("other", "NaN"): '"NaN"', ("spaced", "5"): '"5"',
    }  # fmt: skip
    assert {(key, text): types.json_of(text, types.of("f", key)) for key, text in written} == written


def test_a_long_answer_takes_linear_time() -> None:
    """Steps are counted, not seconds: each character is looked at a few times only."""
    reader = reader_of("hermes", markers_of("hermes", as_tokens=True), thinks=True)
    for _ in range(20_000):
        reader.read("word ")
    assert reader._calls.source.rest in ("", " ")
