"""The parsing rules, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.option_configs import Colour, Config, Positional

from wire.cli.parsing import UsageError, parse


def ask(*argv: str, **environ: str) -> Config:
    return parse(Config, argv, environ)


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        ask(*argv, **environ)
    return str(caught.value)


def test_defaults() -> None:
    assert ask() == Config()


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--max-batch-size", "7"], "max_batch_size", 7),
        (["--max-batch-size=7"], "max_batch_size", 7),
        (["--max-batch-size", "+7"], "max_batch_size", 7),
        (["-p", "80"], "port", 80),
        (["-p80"], "port", 80),
        (["-p=80"], "port", 80),
        (["-jp", "80"], "port", 80),
        (["--ratio", "1"], "ratio", 1.0),
        (["--ratio=1e-3"], "ratio", 0.001),
        (["--name", ""], "name", ""),
        (["--name=-x"], "name", "-x"),
        (["--name=a=b"], "name", "a=b"),
        (["--cache", "/a b"], "cache", Path("/a b")),
        (["--json-output"], "json_output", True),
        (["-j"], "json_output", True),
        (["--no-convert"], "convert", False),
        (["--convert"], "convert", True),
        (["--no-quiet"], "quiet", False),
        (["--sharded", "true"], "sharded", True),
        (["--sharded=false"], "sharded", False),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--colour", "dark-blue"], "colour", Colour.DARK_BLUE),
        (["--origin", "a", "--origin", "b,c"], "origin", ["a", "b,c"]),
        (["--graphs", "1, 2,", "--graphs=4"], "graphs", (1, 2, 4)),
    ],
)
def test_command_line(argv: list[str], field: str, value: Any) -> None:
    assert getattr(ask(*argv), field) == value


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"MAX_BATCH_SIZE": "7"}, "max_batch_size", 7),
        ({"MAX_BATCH_SIZE": ""}, "max_batch_size", None),
        ({"JSON_OUTPUT": "1"}, "json_output", True),
        ({"JSON_OUTPUT": "True"}, "json_output", True),
        ({"JSON_OUTPUT": "YES"}, "json_output", True),
        ({"JSON_OUTPUT": "on"}, "json_output", True),
        ({"JSON_OUTPUT": "0"}, "json_output", False),
        ({"JSON_OUTPUT": "off"}, "json_output", False),
        ({"JSON_OUTPUT": ""}, "json_output", False),
        ({"CONVERT": "no"}, "convert", False),
        ({"SHARDED": "false"}, "sharded", False),
        ({"ORIGIN": "a,b"}, "origin", ["a,b"]),
        ({"GRAPHS": "1,2"}, "graphs", (1, 2)),
        ({"REPORT": "true"}, "report", False),
        ({"OTHER_NAME": "x"}, "special", "x"),
        ({"SPECIAL": "x"}, "special", None),
        ({"max_batch_size": "7"}, "max_batch_size", None),
    ],
)
def test_environment(environ: dict[str, str], field: str, value: Any) -> None:
    assert getattr(parse(Config, [], environ), field) == value


def test_command_line_wins() -> None:
    assert ask("--port", "1", PORT="2").port == 1
    assert ask(PORT="2").port == 2
    # A variable that is not needed is not looked at.
    assert ask("--port", "1", PORT="nonsense").port == 1


def test_port_of_a_kubernetes_service_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert ask(PORT="tcp://10.0.0.1:80").port == 3000
    assert "PORT=tcp://10.0.0.1:80" in caplog.text


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--port", "abc"], {}, ["'abc'", "--port", "whole number"]),
        (["--port", "1.5"], {}, ["whole number"]),
        (["--port", "1_000"], {}, ["whole number"]),
        (["--port", " 1"], {}, ["whole number"]),
        (["--port", "٣"], {}, ["whole number"]),
        (["--port", ""], {}, ["whole number"]),
        (["--port", "65536"], {}, ["0..=65535"]),
        (["--port", "-1"], {}, ["-1", "0..=65535"]),
        (["--port=-1"], {}, ["0..=65535"]),
        ([], {"PORT": "99999"}, ["99999", "environment variable PORT"]),
        (["--max-batch-size", "9" * 30], {}, ["whole number"]),
        (["--ratio", "nan"], {}, ["number"]),
        (["--ratio", "inf"], {}, ["number"]),
        (["--ratio", "1_0"], {}, ["number"]),
        (["--ratio", "-0.5"], {}, ["not in 0..=3.4028234663852886e+38"]),
        (["--sharded"], {}, ["a value is required", "--sharded"]),
        (["--sharded", "--json-output"], {}, ["a value is required"]),
        (["--sharded", "maybe"], {}, ["true or false"]),
        (["--json-output=true"], {}, ["unexpected value 'true'", "--json-output"]),
        (["--json-output", "true"], {}, ["unexpected argument 'true'"]),
        ([], {"JSON_OUTPUT": "maybe"}, ["'maybe'", "JSON_OUTPUT"]),
        (["--no-json-output"], {}, ["--no-json-output"]),
        (["--dtype", "FLOAT16"], {}, ["float16, bfloat16"]),
        (["--colour", "RED"], {}, ["red, dark-blue"]),
        (["--max_batch_size", "1"], {}, ["--max_batch_size"]),
        (["--max-batch", "1"], {}, ["--max-batch"]),
        (["--PORT", "1"], {}, ["--PORT"]),
        (["-x"], {}, ["-x"]),
        (["-p"], {}, ["a value is required"]),
        (["--port", "1", "-p", "2"], {}, ["--port", "multiple times"]),
        (["-j", "--json-output"], {}, ["multiple times"]),
        (["--convert", "--no-convert"], {}, ["multiple times"]),
        (["model"], {}, ["unexpected argument 'model'"]),
        (["--graphs", "1", "2"], {}, ["unexpected argument '2' found; several values are written as '--graphs 1,2'"]),
        (["--", "--port"], {}, ["unexpected argument '--port'"]),
    ],
)
def test_refusals(argv: list[str], environ: dict[str, str], words: list[str]) -> None:
    text = refusal(*argv, **environ)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("argv", [["--port", "1", "2"], ["--graphs", "1", "--port", "2", "3"], ["--origin", "a", "b"]])
def test_only_lists_with_a_separator_are_said_to_take_one(argv: list[str]) -> None:
    assert refusal(*argv) == f"unexpected argument '{argv[-1]}' found"


@pytest.mark.parametrize(
    ("argv", "cuts", "port"),
    [
        (["--cuts"], "true", 3000),
        (["--cuts", "false"], "false", 3000),
        (["--cuts=false"], "false", 3000),
        (["--cuts", "--port", "2"], "true", 2),
        (["--port", "2", "--cuts"], "true", 2),
    ],
)
def test_a_value_may_be_left_out_where_the_option_says_so(argv: list[str], cuts: str, port: int) -> None:
    assert ask(*argv) == Config(cuts=cuts, port=port)  # type: ignore[arg-type]


def test_positional() -> None:
    assert parse(Positional, ["m", "--revision", "r"], {}) == Positional(model_id="m", revision="r")
    assert parse(Positional, ["--revision", "r", "--", "-m"], {}).model_id == "-m"
    with pytest.raises(UsageError, match="MODEL_ID"):
        parse(Positional, [], {"MODEL_ID": "x"})
    with pytest.raises(UsageError, match="unexpected argument 'b'"):
        parse(Positional, ["a", "b"], {})
