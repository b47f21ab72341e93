"""`[TOOL_CALLS][{"name": N, "arguments": JSON}]`: older models of Mistral."""

from __future__ import annotations

from router.answers.formats.format import SPACE, CallForm, CallReader, Format, IdKind
from router.answers.formats.pieces.json_call import json_calls
from router.answers.formats.source import Steps

_OPENERS = ("[TOOL_CALLS]",)


def _read(reader: CallReader, opener: str) -> Steps[None]:
    if (yield from reader.space_and("[")):
        yield from json_calls(reader)


FORMAT = Format(
    name="mistral_json",
    openers=_OPENERS,
    aliases=("mistral",),
    ids=IdKind.SHORT,
    signs=lambda template: "[TOOL_CALLS]" in template and "[ARGS]" not in template,
    form=CallForm(
        before_name='{"name": "',
        behind_name='", "arguments": ',
        behind_arguments="}",
        begin="[TOOL_CALLS]" + SPACE + "[",
        between="," + SPACE,
        end="]",
    ),
    read=_read,
)
