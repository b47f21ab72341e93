"""`<｜tool▁call▁begin｜>function<｜tool▁sep｜>N` and the arguments in a code fence: DeepSeek V3, R1."""

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
    kind, _ = yield from name_before(reader, _SEP)
    name, _ = yield from name_before(reader, "\n")
    if not kind or not name:
        return False
    reader.start(name)
    yield from reader.space_and("```json")
    yield from reader.source.space()
    is_whole = yield from reader.source.json_value(reader.argue)
    yield from reader.space_and("```")
    yield from reader.space_and(_CALL_END)
    return is_whole


FORMAT = Format(
    name="deepseek_v3",
    openers=(_BEGIN, _CALL),
    closers=(_END, _CALL_END),
    others=(_SEP,),
    signs=lambda template: _SEP in template and "```json" in template,
    form=CallForm(
        before_name=_CALL + "function" + _SEP,
        behind_name="\n```json\n",
        behind_arguments="\n```" + _CALL_END,
        begin=_BEGIN,
        between="\n",
        end=_END,
    ),
    read=_read,
)
