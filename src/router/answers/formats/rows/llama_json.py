"""`{"name": N, "parameters": JSON}` as the whole answer or behind `<|python_tag|>`: Llama 3.1 to 3.3."""

from __future__ import annotations

from router.answers.formats.format import SEPARATOR, CallForm, CallReader, Format
from router.answers.formats.pieces.json_call import json_call
from router.answers.formats.pieces.python_call import python_call
from router.answers.formats.source import Steps

_TAG = "<|python_tag|>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    while (yield from reader.attempt(_call(reader, only_offered=not opener))):
        yield from reader.space_and(";")


def _call(reader: CallReader, *, only_offered: bool) -> Steps[bool]:
    yield from reader.source.space()
    if (yield from reader.source.peek()) == "{":
        return (yield from json_call(reader, only_offered=only_offered))
    return (yield from python_call(reader, only_offered=True))


FORMAT = Format(
    name="llama_json",
    aliases=("llama3_json", "llama3", "llama4_json"),
    openers=(_TAG,),
    starts=("{",),
    signs=lambda template: _TAG in template or ("ipython" in template and '"parameters": ' in template),
    form=CallForm(before_name='{"name": "', behind_name='", "parameters": ', behind_arguments="}", between=SEPARATOR),
    read=_read,
)
