"""`[{"name": N, "arguments": JSON}]` as the whole answer, in a code fence or behind other models' marks: xLAM."""

from __future__ import annotations

from router.answers.formats.format import SPACE, CallForm, CallReader, Format
from router.answers.formats.pieces.json_call import json_calls
from router.answers.formats.source import Steps

_FENCE, _TAG = "```json", "<tool_call>"
_CLOSES = {_FENCE: "```", _TAG: "</tool_call>"}


def _read(reader: CallReader, opener: str) -> Steps[None]:
    if (yield from reader.space_and("[")):
        yield from json_calls(reader, _CLOSES.get(opener, ""), only_offered=True)


FORMAT = Format(
    name="xlam",
    openers=(_FENCE, _TAG, "[TOOL_CALLS]"),
    starts=("[",),
    closers=(_CLOSES[_TAG],),
    signs=lambda template: '[{"name": "tool_call_name", "arguments": ' in template,
    form=CallForm(
        before_name='{"name": "',
        behind_name='", "arguments": ',
        behind_arguments="}",
        begin="[",
        between="," + SPACE,
        end="]",
    ),
    read=_read,
)
