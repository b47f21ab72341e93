"""The parser of tool calls: whatever the pieces, the same arguments, and they are the object that was meant."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers.tgi_form.call_parser import ToolCallParser

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
_ARGUMENTS = st.dictionaries(st.text().filter(lambda key: key != "_name"), _VALUES, max_size=5)


def read(pieces: list[str]) -> tuple[ToolCallParser, str]:
    parser = ToolCallParser()
    return parser, "".join([parser.feed(piece) for piece in pieces])


@given(
    name=st.text(min_size=1),
    arguments=_ARGUMENTS,
    ascii_only=st.booleans(),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
    data=st.data(),
)
def test_any_split_gives_the_same_arguments(
    name: str, arguments: dict[str, Any], ascii_only: bool, separators: tuple[str, str], data: st.DataObject
) -> None:
    call = {"function": {"_name": name, **arguments}}
    text = json.dumps(call, ensure_ascii=ascii_only, separators=separators)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    parser, got = read(pieces)
    assert parser.is_complete and not parser.is_malformed and parser.name == name
    assert json.loads(got) == arguments
    assert list(json.loads(got)) == list(arguments)
    assert got == json.dumps(arguments, ensure_ascii=ascii_only, separators=(",", ":"))
    whole, at_once = read([text])
    assert at_once == got and whole.name == name


@given(arguments=_ARGUMENTS, data=st.data())
def test_a_cut_call_gives_a_beginning_of_its_arguments(arguments: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps({"function": {"_name": "f", **arguments}})
    parser, got = read([text[: data.draw(st.integers(0, len(text) - 1))]])
    assert not parser.is_complete and not parser.is_malformed
    assert json.dumps(arguments, separators=(",", ":")).startswith(got)


@given(st.text())
def test_no_text_is_too_much_for_it(text: str) -> None:
    parser, _ = read(list(text))
    assert not parser.is_complete


def test_the_name_is_known_as_soon_as_it_has_ended() -> None:
    parser = ToolCallParser()
    assert parser.feed('{ "function" : {"_name":"get_') == "" and parser.name is None
    assert parser.feed("weather") == "" and parser.name is None
    assert parser.feed('"') == "" and parser.name == "get_weather"
    assert parser.feed(', "') == '{"'
    assert parser.feed('city": "a\\"} b" , "n" : [1, {"x" : 2}]') == 'city":"a\\"} b","n":[1,{"x":2}]'
    assert parser.feed("}") == "}" and not parser.is_complete
    assert parser.feed("} ") == "" and parser.is_complete


@pytest.mark.parametrize(
    "text",
    ["x", "[", '{"tool"', '{"function":[', '{"function":{"name"', '{"function":{"_name":1', '{"function":{"_name":"f"x',
     '{"function":{"_name":"f"}]', '{"function":{"_name":"f"}}x', '{"function":{"_name":"\\x"'],
)  # fmt: skip
def test_what_no_call_has(text: str) -> None:
    parser, _ = read([text])
    assert parser.is_malformed and not parser.is_complete
    assert parser.feed('{"function"') == ""
