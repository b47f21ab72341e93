"""Commands around the parser: help, version, usage errors, exit statuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from support.option_configs import Config, Positional

from wire.cli.commands import run_command, run_group, with_variables
from wire.cli.options import options_of
from wire.cli.parsing import parse


def run(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Config]]:
    monkeypatch.delenv("PORT", raising=False)
    seen: list[Config] = []

    def record(config: Config) -> int:
        seen.append(config)
        return 5

    return run_command(Config, record, prog="tool", argv=argv, version="1.2", description="Does it."), seen


def test_run_returns_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "from-environment")
    status, seen = run(["--port", "1"], monkeypatch)
    assert status == 5
    assert seen == [Config(port=1, name="from-environment")]


def test_usage_error_goes_to_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, seen = run(["--prot", "1"], monkeypatch)
    out, err = capsys.readouterr()
    assert (status, seen, out) == (2, [], "")
    assert "error: unexpected argument '--prot' found" in err
    assert "'tool --help'" in err


def test_usage_error_on_a_terminal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run_group({"serve": (Positional, lambda _: 0)}, prog="tool", argv=["x"]) == 2
    assert capsys.readouterr().err == "error: unrecognized command 'x'; 'tool --help' lists the commands\n"


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag], monkeypatch) == (0, [])
    assert capsys.readouterr().out == "tool 1.2\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_everything(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "120")
    assert run(["--port", "bad", flag], monkeypatch) == (0, [])
    out, err = capsys.readouterr()
    assert err == ""
    assert "Does it." in out
    for opt in options_of(Config):
        assert opt.flag in out
    for text in ("[default: 3000]", "<float16|bfloat16>", "--no-convert", "OTHER_NAME"):
        assert text in out


def test_groups(capsys: pytest.CaptureFixture[str]) -> None:
    def serve(config: Positional) -> int:
        """Serves."""
        return 1 if config.model_id == "m" else 2

    def other(config: Config) -> int:
        """Does something else."""
        return config.port

    commands: dict[str, Any] = {"serve": (Positional, serve), "other": (Config, other)}

    def group(*argv: str, **more: Any) -> int:
        return run_group(commands, prog="tool", argv=argv, version="9", **more)

    assert group("serve", "m") == 1
    assert group("other", "--port", "7") == 7
    assert group("serve") == 2
    assert "tool serve --help" in capsys.readouterr().err
    assert group("nothing") == 2
    assert group() == 2
    assert group("--version") == 0
    assert group("--help") == 0
    out = capsys.readouterr().out
    assert "serve" in out and "Does something else." in out
    assert group("--help", default=(Config, other)) == 0
    out = capsys.readouterr().out
    assert "serve" in out and "Does something else." in out and "--max-batch-size" in out
    # The router's form: options of its own, and a command beside them.
    assert group("--port", "8", default=(Config, other)) == 8
    assert group("serve", "m", default=(Config, other)) == 1


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("serv", "a similar one exists: 'serve'"),
        ("bnech", "a similar one exists: 'bench'"),
        ("--", None),
        ("org/model", "'tool --help' lists the commands"),
        ("", "'tool --help' lists the commands"),
    ],
)
def test_a_misspelt_command(word: str, hint: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where options go without a command."""
    commands: dict[str, Any] = {"serve": (Positional, lambda _: 0), "bench": (Config, lambda _: 0)}
    status = run_group(commands, prog="tool", argv=[word], default=(Config, lambda _: 0))
    assert status == (2 if hint else 0)
    message = f"error: unrecognized command '{word}'; {hint}" if hint else ""
    assert capsys.readouterr().err.rstrip().endswith(message)


def test_a_word_for_which_the_program_knows_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    commands: dict[str, Any] = {"serve": (Positional, lambda _: 0)}
    assert run_group(commands, prog="tool", argv=["a/b"], remedy=lambda word: f"try {word}") == 2
    assert capsys.readouterr().err.endswith("error: unrecognized command 'a/b'; try a/b\n")
    assert run_group(commands, prog="tool", argv=["serv"], remedy=lambda word: None) == 2
    assert "a similar one exists: 'serve'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("tool ser", ["serve"]),
        ("tool --max", ["--max-batch-size"]),
        ("tool --dtype b", ["bfloat16"]),
        ("tool serve --rev", ["--revision"]),
        ("tool --name x", []),
        ("tool serve o", ["org/a", "org/b"]),
        ("tool serve ./o", []),
    ],
)
def test_shell_completion(
    typed: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TOOL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    commands: dict[str, Any] = {"serve": (Positional, lambda _: 1)}
    values = {"model_id": lambda: ["org/a", "org/b", "x"]}
    assert run_group(commands, prog="tool", argv=[], default=(Config, lambda _: 1), values=values) == 0
    assert capsys.readouterr().out.split() == expected


def test_the_script_for_a_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_TOOL_COMPLETE", "source_bash")
    assert run_group({"serve": (Positional, lambda _: 1)}, prog="tool", argv=[], default=(Config, lambda _: 1)) == 0
    assert "_TOOL_COMPLETE=complete_bash" in capsys.readouterr().out


def test_an_ordinary_start_does_not_import_typer() -> None:
    program = (
        "import sys, dataclasses; from wire.cli.commands import run_command; from wire.cli.options import option;"
        "C = dataclasses.make_dataclass('C', [('a', int, option(1, help='a'))], frozen=True, kw_only=True);"
        "assert run_command(C, lambda c: c.a, prog='x', argv=['--a', '4']) == 4;"
        "sys.exit(int('typer' in sys.modules or 'rich' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("argv", "environ", "variables"),
    [
        ([], {"PORT": "80"}, "PORT"),
        ([], {"PORT": "80", "OTHER_NAME": "x"}, "PORT, OTHER_NAME"),
        (["--port", "81"], {"PORT": "80"}, None),
        ([], {"PORT": ""}, None),
        ([], {"PORT": "tcp://10.0.0.1:80"}, None),
        ([], {"NAME": "--port", "GRAPHS": "1,2"}, None),
    ],
)
def test_an_error_names_the_variables_of_its_options(
    argv: list[str], environ: dict[str, str], variables: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    text = "`--port` contradicts `--special`, not --port-range"
    wanted = text if variables is None else f"{text} (from the environment: {variables})"
    assert with_variables(text, parse(Config, argv, environ)) == wanted
