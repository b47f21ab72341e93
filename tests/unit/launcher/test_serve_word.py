"""`launcher serve MODEL` means what `launcher --model-id MODEL` means."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.config import LauncherConfig, ServeConfig
from wire.cli.options import options_of
from wire.cli.parsing import UsageError, parse

OTHER = ["--num-shard", "2", "--port=8080", "--cuda-graphs", "1,2"]


@pytest.mark.parametrize("argv", [["some/model", *OTHER], [*OTHER, "some/model"], ["--model-id", "some/model", *OTHER]])
def test_the_same_as_with_the_option(argv: list[str]) -> None:
    asked = parse(LauncherConfig, ["--model-id", "some/model", *OTHER], {})
    assert dataclasses.asdict(parse(ServeConfig, argv, {})) == {**dataclasses.asdict(asked), "more_models": []}


def test_the_variable_is_read() -> None:
    assert parse(ServeConfig, [], {"MODEL_ID": "some/model", "PORT": "80"}).model_id == "some/model"
    assert parse(ServeConfig, ["other"], {"MODEL_ID": "some/model"}).model_id == "other"


def test_every_option_is_there() -> None:
    flags = [opt.flag for opt in options_of(ServeConfig) if opt.has_flag]
    assert flags == [opt.flag for opt in options_of(LauncherConfig)]


def test_several_models() -> None:
    config = parse(ServeConfig, ["a", *OTHER, "b", "c"], {})
    assert (config.model_id, config.more_models) == ("a", ["b", "c"])


@pytest.mark.parametrize("argv", [["a", "--model-id", "b"], ["--model-id", "a", "b"]])
def test_by_option_only_one_model(argv: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(ServeConfig, argv, {})


def test_no_model() -> None:
    with pytest.raises(UsageError, match=r"required argument was not provided: <MODEL>.*`demo`"):
        parse(ServeConfig, [], {})


@pytest.mark.parametrize("argv", [["demo", "--trust-remote-code", "true"], ["--env", "false", "demo"]])
def test_a_value_behind_a_switch_is_no_model(argv: list[str]) -> None:
    with pytest.raises(UsageError, match=r"'(true|false)' found: a switch, as --trust-remote-code, takes no value"):
        parse(ServeConfig, argv, {})
