"""What `to_argv` and `to_environment` write, `parse` reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.option_configs import Colour, Config

from wire.cli.parsing import parse
from wire.cli.spelling import _edits, closest, to_argv, to_environment

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_CONFIGS = st.builds(
    Config,
    max_batch_size=st.none() | st.integers(0, 1000),
    port=st.integers(0, 65535),
    ratio=st.floats(0, 1e30, allow_nan=False),
    name=_TEXT,
    cache=st.none() | st.just(Path("-odd/path")) | st.just(Path("/x")),
    json_output=st.booleans(),
    quiet=st.booleans(),
    dtype=st.sampled_from([None, "float16", "bfloat16"]),
    colour=st.sampled_from(Colour),
    origin=st.lists(_TEXT, max_size=3),
    graphs=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    report=st.booleans(),
    special=st.none() | _TEXT,
)


@given(_CONFIGS)
@settings(max_examples=examples(15, 240), deadline=None)
def test_argv_reproduces_the_config(config: Config) -> None:
    values = dataclasses.asdict(config)
    del values["sharded"], values["convert"]  # not switches that are off by default
    assert parse(Config, to_argv(values), {}) == config


def test_argv() -> None:
    assert to_argv({"name": None, "json_output": False, "origin": []}) == []
    values = {"port": 1, "ratio": 1.0, "json_output": True, "graphs": (1, 2), "colour": Colour.DARK_BLUE, "name": "-x"}
    assert to_argv(values) == [
        "--port", "1", "--ratio", "1", "--json-output", "--graphs", "1", "--graphs", "2", "--colour", "dark-blue",
        "--name=-x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_batch_size", 0, "0"),
        ("ratio", 2.0, "2"),
        ("cache", Path("/a b"), "/a b"),
        ("json_output", True, "True"),
        ("colour", Colour.DARK_BLUE, "dark-blue"),
        ("graphs", (1, 2), "1,2"),
    ],
)
def test_environment(name: str, value: Any, text: str) -> None:
    environ = to_environment({name: value, "quiet": False, "dtype": None})
    assert environ == {name.upper(): text}
    assert getattr(parse(Config, [], environ), name) == value


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("temprature", ["temperature", "top_p"], "temperature"),
        ("tempreature", ["temperature"], "temperature"),
        ("Max-New-Tokens", ["max_new_tokens", "min_new_tokens"], "max_new_tokens"),
        ("max_token", ["max_tokens", "min_tokens"], "max_tokens"),
        ("top_a", ["top_k", "top_p"], None),
        ("x", ["n"], None),
        ("", ["n", ""], ""),
        ("temperature_last", ["temperature"], None),
        ("anything", [], None),
    ],
)
def test_the_closest_name(name: str, known: list[str], expected: str | None) -> None:
    assert closest(name, known, letters_per_edit=5) == expected


_LETTERS = st.text("abc", max_size=8)


@given(_LETTERS, _LETTERS, st.integers(0, 3))
@settings(max_examples=examples(200, 2000), deadline=None)
def test_edits_are_counted_up_to_the_most(a: str, b: str, most: int) -> None:
    """What stops early stops only where there are more."""
    whole = _edits(a, b, 99)
    assert min(_edits(a, b, most), most + 1) == min(whole, most + 1)
    assert whole == _edits(b, a, 99) and (whole == 0) == (a == b)
