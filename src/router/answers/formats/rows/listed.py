"""`<TOOLCALL>[{"name": N, "arguments": JSON}]</TOOLCALL>` (Nemotron Nano 2), `<tool_calls>` (Hunyuan A13B, Jamba,
MiniMax M1 without brackets).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.answers.formats.format import SPACE, CallForm, CallReader, Format
from router.answers.formats.pieces.json_call import json_call, json_calls
from router.answers.formats.source import Steps

_Read = Callable[[CallReader, str], Steps[None]]


def _reads(close: str) -> _Read:
    def read(reader: CallReader, opener: str) -> Steps[None]:
        if (yield from reader.space_and("[")):
            yield from json_calls(reader, close)
            return
        while (yield from reader.attempt(_call(reader))):
            yield from reader.space_and(",")
        if reader.num_started:
            yield from reader.space_and(close)

    return read


def _call(reader: CallReader) -> Steps[bool]:
    yield from reader.source.space()
    return (yield from json_call(reader))


def _format(opens: str, closes: str, **names: Any) -> Format:
    return Format(
        openers=(opens,),
        closers=(closes,),
        form=CallForm(
            before_name='{"name": "',
            behind_name='", "arguments": ',
            behind_arguments="}",
            begin=opens + "[",
            between="," + SPACE,
            end="]" + closes,
        ),
        read=_reads(closes),
        **names,
    )


TOOLCALL = _format(
    "<TOOLCALL>",
    "</TOOLCALL>",
    name="nemotron_nano_v2",
    aliases=("nemotron_json",),
    signs=lambda template: "<TOOLCALL>" in template,
)
TOOL_CALLS = _format(
    "<tool_calls>",
    "</tool_calls>",
    name="hunyuan_a13b",
    aliases=("jamba", "minimax", "minimax_m1"),
    signs=lambda template: "<tool_calls>" in template and "<tool_call>" not in template,
)
