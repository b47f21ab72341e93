"""`<|START_ACTION|>[{"tool_name": N, "parameters": JSON}]<|END_ACTION|>`: Command R7B, Command A."""

from __future__ import annotations

from router.answers.formats.format import INDEX, SPACE, CallForm, CallReader, Format
from router.answers.formats.pieces.json_call import json_calls
from router.answers.formats.source import Steps

_OPENERS = ("<|START_ACTION|>",)


def _read(reader: CallReader, opener: str) -> Steps[None]:
    if (yield from reader.space_and("[")):
        yield from json_calls(reader, "<|END_ACTION|>", name_key="tool_name")


FORMAT = Format(
    name="cohere",
    openers=_OPENERS,
    closers=("<|END_ACTION|>",),
    aliases=("cohere_command3",),
    signs=lambda template: "<|START_ACTION|>" in template,
    form=CallForm(
        before_name='{"tool_call_id": "' + INDEX + '", "tool_name": "',
        behind_name='", "parameters": ',
        behind_arguments="}",
        begin="<|START_ACTION|>[" + SPACE,
        between="," + SPACE,
        end=SPACE + "]<|END_ACTION|>",
    ),
    read=_read,
)
