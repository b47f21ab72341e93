"""`<tool_call>{"name": N, "arguments": JSON}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4; LongCat with
`<longcat_tool_call>`."""

from __future__ import annotations

from typing import Any

from router.answers.formats.format import CallForm, CallReader, Format
from router.answers.formats.pieces.json_call import json_call
from router.answers.formats.source import Steps


def _call(reader: CallReader) -> Steps[bool]:
    yield from reader.source.space()
    return (yield from json_call(reader))


def _format(opens: str, between: str, **names: Any) -> Format:
    closes = opens.replace("<", "</")

    def read(reader: CallReader, opener: str) -> Steps[None]:
        yield from reader.attempt(_call(reader))
        yield from reader.space_and(closes)

    return Format(
        openers=(opens,),
        closers=(closes,),
        signs=lambda template: opens in template,
        form=CallForm(
            before_name=opens + '\n{"name": "',
            behind_name='", "arguments": ',
            behind_arguments="}\n" + closes,
            between=between,
        ),
        read=read,
        **names,
    )


FORMAT = _format("<tool_call>", "\n", name="hermes", aliases=("qwen", "qwen25", "qwen3", "granite4", "ernie45"))
LONGCAT = _format("<longcat_tool_call>", "", name="longcat_json", aliases=("longcat",))
