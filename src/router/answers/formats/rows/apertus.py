"""`<|tools_prefix|>[{N: JSON}]<|tools_suffix|>`, with the name as the only key: Apertus."""

from __future__ import annotations

from router.answers.formats.format import SPACE, CallForm, CallReader, Format
from router.answers.formats.source import Steps

_OPEN, _CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    mark = yield from reader.space_and("[")
    while mark and (yield from reader.attempt(_call(reader))):
        mark = yield from reader.space_and(",")
    if reader.num_started:
        yield from reader.space_and("]")
        yield from reader.space_and(_CLOSE)


def _call(reader: CallReader) -> Steps[bool]:
    if not (yield from reader.space_and("{")):
        return False
    yield from reader.source.space()
    name = yield from reader.source.json_string()
    if not name or not (yield from reader.space_and(":")):
        return False
    reader.start(name)
    yield from reader.source.space()
    is_whole = yield from reader.source.json_value(reader.argue)
    return is_whole and bool((yield from reader.space_and("}")))


FORMAT = Format(
    name="apertus",
    aliases=("apertus2509",),
    openers=(_OPEN,),
    closers=(_CLOSE,),
    signs=lambda template: _OPEN in template,
    form=CallForm(
        before_name='{"',
        behind_name='": ',
        behind_arguments="}",
        begin=_OPEN + "[",
        between="," + SPACE,
        end="]" + _CLOSE,
    ),
    read=_read,
)
