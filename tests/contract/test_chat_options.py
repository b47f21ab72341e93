"""The names of formats that the launcher accepts are those that the router has."""

from __future__ import annotations

import pytest

from router.answers.formats import reasoning, table
from wire.text.chat_options import AUTO, HARMONY, NONE, REASONING_PARSERS, TGI, TOOL_CALL_PARSERS, check_chat_options

CALLS = {name for row in table.FORMATS.values() for name in row.aliases}
WHOLE = [row for row in table.FORMATS.values() if row.turn is not None]
"""Formats that read a whole answer read its reasoning, too."""
STYLES = {name for style in (*reasoning.STYLES, *WHOLE) for name in style.aliases}


def test_the_names_that_are_shown() -> None:
    assert (AUTO, TGI, *sorted(table.FORMATS)) == TOOL_CALL_PARSERS
    styles = [style.name for style in reasoning.STYLES]
    styles += [row.name for row in WHOLE if row.name != HARMONY]
    assert (AUTO, NONE, HARMONY, *sorted(styles)) == REASONING_PARSERS


def test_every_name_is_accepted() -> None:
    for name in (*TOOL_CALL_PARSERS, *CALLS):
        check_chat_options(name, None, None, ValueError)
    for name in (*REASONING_PARSERS, *STYLES):
        check_chat_options(None, name, None, ValueError)


@pytest.mark.parametrize("name", sorted((STYLES | {NONE, *REASONING_PARSERS}) - CALLS - {*TOOL_CALL_PARSERS}))
def test_a_style_of_reasoning_is_no_format_of_calls(name: str) -> None:
    with pytest.raises(ValueError, match="`--tool-call-parser`"):
        check_chat_options(name, None, None, ValueError)


@pytest.mark.parametrize("name", sorted((CALLS | {TGI, *TOOL_CALL_PARSERS}) - STYLES - {*REASONING_PARSERS}))
def test_a_format_of_calls_is_no_style_of_reasoning(name: str) -> None:
    with pytest.raises(ValueError, match="`--reasoning-parser`"):
        check_chat_options(None, name, None, ValueError)
