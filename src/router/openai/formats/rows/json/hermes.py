"""`<tool_call>{"name": N, "arguments": JSON}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4."""

from __future__ import annotations

from router.openai.formats.format import CallForm, CallReader, Format
from router.openai.formats.pieces.json_call import json_call
from router.openai.formats.source import Steps

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    yield from reader.attempt(_call(reader))
    yield from reader.space_and(_CLOSE)


def _call(reader: CallReader) -> Steps[bool]:
    yield from reader.source.space()
    return (yield from json_call(reader))


FORMAT = Format(
    name="hermes",
    aliases=("qwen", "qwen25", "qwen3", "granite4", "ernie45"),
    openers=(_OPEN,),
    closers=(_CLOSE,),
    signs=lambda template: _OPEN in template,
    form=CallForm(
        before_name=_OPEN + '\n{"name": "',
        behind_name='", "arguments": ',
        behind_arguments="}\n" + _CLOSE,
        between="\n",
    ),
    read=_read,
)
