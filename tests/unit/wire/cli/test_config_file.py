"""Options from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.option_configs import Colour, Config, Positional

from wire.cli.parsing import UsageError, parse


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("port: 80", "port", 80),
        ("port: '80'", "port", 80),
        ("max-batch-size: 7", "max_batch_size", 7),
        ("max_batch_size: 7", "max_batch_size", 7),
        ("ratio: 1e-1", "ratio", 0.1),
        ("tokens: 8k", "tokens", 8192),
        ("cache: /a b", "cache", Path("/a b")),
        ("json_output: yes", "json_output", True),
        ("convert: false", "convert", False),
        ("sharded: true", "sharded", True),
        ("colour: dark-blue", "colour", Colour.DARK_BLUE),
        ("origin: [a, 'b,c']", "origin", ["a", "b,c"]),
        ("origin: a", "origin", ["a"]),
        ("origin: []", "origin", []),
        ("graphs: [1, 2]", "graphs", (1, 2)),
        ("graphs: 1,2", "graphs", (1, 2)),
        ("report: true", "report", True),
        # What YAML would make something else of.
        ("name: 1.10", "name", "1.10"),
        ("name: 0123", "name", "0123"),
        ("name: off", "name", "off"),
        ("name: 2026-01-01", "name", "2026-01-01"),
        # Nothing is said.
        ("port:", "port", 3000),
        ("name: null", "name", "bloom"),
        ("", "port", 3000),
        ("# nothing", "port", 3000),
    ],
)
def test_values(file: Path, text: str, field: str, value: Any) -> None:
    file.write_text(text)
    assert getattr(parse(Config, ["--file", str(file)], {}), field) == value


def test_command_line_and_variables_win(file: Path) -> None:
    file.write_text("port: 1\nname: file\ncache: /file\norigin: [a]\n")
    config = parse(
        Config, ["--port", "2", "--origin", "b"], {"CONFIG_FILE": str(file), "PORT": "3", "NAME": "variable"}
    )
    assert (config.port, config.name, config.cache, config.origin) == (2, "variable", Path("/file"), ["b"])
    assert config.file == file


def test_a_value_that_is_not_needed_is_not_looked_at(file: Path) -> None:
    file.write_text("port: nonsense")
    assert parse(Config, ["--file", str(file), "--port", "2"], {}).port == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\nport: 99999", "invalid value '99999' for '--port <PORT>' (from {file}, line 2): 99999 is not in 0..=65535"),
        ("dtype: fp16", "(from {file}, line 1): possible values: float16, bfloat16"),
        ("name: a\nprot: 80", "--file: {file}, line 2: unknown option 'prot'; a similar one exists: 'port'"),
        ("colours: x\n", "unknown option 'colours'; a similar one exists: 'colour'"),
        ("zzz: x", "--file: {file}, line 1: unknown option 'zzz'"),
        ("file: other.yaml", "line 1: unknown option 'file'"),
        ("[a, b]: x", "line 1: unknown option"),
        ("port: 1\nname: a\nport: 2", "line 3: 'port' is given again, after line 1"),
        ("max-batch-size: 1\nmax_batch_size: 2", "line 2: 'max_batch_size' is given again, after line 1"),
        ("port: [1, 2]", "line 1: 'port' takes one value"),
        ("port: []", "line 1: 'port' takes one value"),
        ("port: {{a: 1}}", "line 1: 'port' takes one value"),
        ("origin: {{a: 1}}", "line 1: 'origin' takes one value or a list of values"),
        ("origin: [[a]]", "line 1: 'origin' takes one value or a list of values"),
        ("graphs: [1, x]", "invalid value 'x' for"),
        ("port", "--file: {file} holds no options; it takes lines such as `port: 8080`"),
        ("- port", "holds no options"),
        ("port: [", "line 1 is not YAML: "),
        ("port: 1\n name: 2", "line 2 is not YAML: "),
        ("a: 1\n---\nb: 2", "line 2 is not YAML: "),
        ("name: \x01", "{file} is not YAML: "),
        ("port: " + "[" * 600, "{file} is nested too deeply"),
    ],
)
def test_refusals(file: Path, text: str, words: str) -> None:
    file.write_text(text.replace("{{", "{").replace("}}", "}"))
    with pytest.raises(UsageError) as caught:
        parse(Config, ["--file", str(file)], {})
    assert words.format(file=file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(UsageError, match=f"--file: cannot read {path}: "):
            parse(Config, [], {"CONFIG_FILE": str(path)})
    with pytest.raises(UsageError, match="cannot read ~no-such-user/x: No such file or directory"):
        parse(Config, ["--file", "~no-such-user/x"], {})


def test_a_secret_of_the_file_is_not_shown(file: Path) -> None:
    from launcher.config import LauncherConfig

    file.write_text("api-key: k\u00e9y-of-mine")
    with pytest.raises(UsageError, match="--api-key") as caught:
        parse(LauncherConfig, ["--config", str(file)], {})
    assert "of-mine" not in str(caught.value)


def test_a_config_without_such_an_option() -> None:
    assert parse(Positional, ["m"], {"CONFIG_FILE": "nowhere"}).model_id == "m"
