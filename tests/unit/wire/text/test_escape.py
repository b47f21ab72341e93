"""Nothing that somebody else wrote can draw on a terminal, reorder a line or begin a new one."""

from __future__ import annotations

import io
import logging

import pytest

from launcher.errors import ArgumentValidation
from router.api.errors import error_body, event_of
from router.errors import BackendError, ValidationError
from wire.cli.commands import run_command
from wire.log import log_setup
from wire.text.escape import MOST_BYTES, escape, one_line, quoted, shown, shown_in_line

HOSTILE = "x\n\x1b[2J\r\x07\x7f\x9b2J\u202egpj.exe\u2066\u200f\u061c\u2028\ud800 e\u0301 \u65e5"
ESCAPED = "\\x1b[2J\\r\\x07\\x7f\\x9b2J\\u202egpj.exe\\u2066\\u200f\\u061c\\u2028\\ud800 e\u0301 \u65e5"


def test_newlines_stay_only_where_lines_are_meant() -> None:
    assert escape(HOSTILE) == "x\n" + ESCAPED
    assert one_line(HOSTILE) == "x\\n" + ESCAPED


def test_a_long_text_is_cut() -> None:
    for text in (shown("\x1b" * 10**7), shown_in_line("\n" * 10**7), quoted('"' * 10**7)):
        assert len(text) < MOST_BYTES + 100


def test_the_last_line_of_a_start_is_one_line() -> None:
    assert ArgumentValidation(HOSTILE).report() == f'Error: ArgumentValidation("x\\n{ESCAPED}")'
    assert BackendError(HOSTILE).report(HOSTILE) == f'Error: Backend("x\\n{ESCAPED}")'


def test_a_usage_error_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    from router.config import RouterConfig

    assert run_command(RouterConfig, lambda config: 0, prog="router", argv=["--\x1b[2J"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_an_error_of_a_client_is_escaped() -> None:
    assert error_body(str(ValidationError(HOSTILE)), "validation")["error"].endswith(ESCAPED)
    assert "\u202e".encode() not in event_of(ValidationError(HOSTILE), "openai")


@pytest.mark.parametrize("json_output", [False, True])
def test_a_quoted_newline_begins_no_line_of_the_log(json_output: bool) -> None:
    stream = io.StringIO()
    log_setup.configure(json_output, stream=stream)
    log = logging.getLogger("router.escape")
    log.error("%s", ValueError(HOSTILE), extra={"field": HOSTILE})
    log.error("two\n%s", "lines")
    try:
        raise RuntimeError("with a traceback")
    except RuntimeError:
        log.exception("failed")
    text = stream.getvalue()
    assert text.isprintable() or "\x1b" not in text
    one, two, *traceback = text.splitlines()
    assert "x\\" in one
    if not json_output:
        assert "field=x\\n\\x1b" in one
        assert (two.endswith("two"), traceback[0]) == (True, "  lines")
        assert "  Traceback (most recent call last):" in traceback
