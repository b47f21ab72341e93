"""`<|tool_call|>[{"name": N, "arguments": JSON}]`: Granite 3.0, and 3.1 with `<tool_call>`."""

from __future__ import annotations

from router.answers.formats.format import SPACE, CallForm, CallReader, Format
from router.answers.formats.pieces.json_call import json_calls
from router.answers.formats.source import Steps

_OPENERS = (
    "<|tool_call|>",
    "<tool_call>",
)


def _read(reader: CallReader, opener: str) -> Steps[None]:
    if (yield from reader.space_and("[")):
        yield from json_calls(reader)


FORMAT = Format(
    name="granite3",
    openers=_OPENERS,
    aliases=("granite",),
    signs=lambda template: "<|tool_call|>" in template,
    form=CallForm(
        before_name='{"name": "',
        behind_name='", "arguments": ',
        behind_arguments="}",
        begin="<|tool_call|>[",
        between="," + SPACE,
        end="]",
    ),
    read=_read,
)
