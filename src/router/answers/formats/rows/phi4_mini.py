"""`functools[{"name": N, "arguments": JSON}]`: Phi 4 mini."""

from __future__ import annotations

from router.answers.formats.format import SPACE, CallForm, CallReader, Format
from router.answers.formats.pieces.json_call import json_calls
from router.answers.formats.source import Steps

_OPENERS = (
    "functools",
    "<|tool_call|>",
)


def _read(reader: CallReader, opener: str) -> Steps[None]:
    if (yield from reader.space_and("[")):
        yield from json_calls(reader, "<|/tool_call|>")


FORMAT = Format(
    name="phi4_mini",
    openers=_OPENERS,
    closers=("<|/tool_call|>",),
    aliases=("phi4_mini_json",),
    signs=lambda template: "functools" in template,
    form=CallForm(
        before_name='{"name": "',
        behind_name='", "arguments": ',
        behind_arguments="}",
        begin="functools[",
        between="," + SPACE,
        end="]",
    ),
    read=_read,
)
