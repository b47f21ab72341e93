"""`<｜tool▁call▁begin｜>N<｜tool▁sep｜>JSON<｜tool▁call▁end｜>`: DeepSeek V3.1."""

from __future__ import annotations

from router.answers.formats.format import CallForm, CallReader, Format
from router.answers.formats.pieces.names import name_before
from router.answers.formats.source import Steps

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    is_complete = yield from reader.attempt(_call(reader, opener))
    while is_complete:
        is_complete = yield from reader.attempt(_call(reader, ""))
    yield from reader.space_and(_END)


def _call(reader: CallReader, opener: str) -> Steps[bool]:
    if opener != _CALL and not (yield from reader.space_and(_CALL)):
        return False
    name, _ = yield from name_before(reader, _SEP)
    if not name:
        return False
    reader.start(name)
    yield from reader.source.space()
    is_whole = yield from reader.source.json_value(reader.argue)
    yield from reader.space_and(_CALL_END)
    return is_whole


FORMAT = Format(
    name="deepseek_v31",
    openers=(_BEGIN, _CALL),
    closers=(_END, _CALL_END),
    others=(_SEP,),
    signs=lambda template: _SEP in template,
    form=CallForm(before_name=_CALL, behind_name=_SEP, behind_arguments=_CALL_END, begin=_BEGIN, end=_END),
    read=_read,
)
