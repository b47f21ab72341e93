"""`[TOOL_CALLS]N[ARGS]JSON`: Devstral 2, Magistral, Ministral 3."""

from __future__ import annotations

from router.answers.formats.format import OWN_ID, CallForm, CallReader, Format, IdKind
from router.answers.formats.pieces.names import name_before
from router.answers.formats.source import Steps

_OPEN, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    yield from reader.attempt(_call(reader))


def _call(reader: CallReader) -> Steps[bool]:
    own_id = None
    name, mark = yield from name_before(reader, _ID, _ARGS)
    if mark == _ID:
        own_id, mark = yield from name_before(reader, _ARGS)
    if not name or not mark:
        return False
    reader.start(name, own_id)
    yield from reader.source.space()
    return (yield from reader.source.json_value(reader.argue))


FORMAT = Format(
    name="mistral_args",
    aliases=("mistral",),
    openers=(_OPEN,),
    others=(_ID, _ARGS),
    ids=IdKind.SHORT,
    signs=lambda template: _ARGS in template,
    form=CallForm(before_name=_OPEN, behind_name=OWN_ID + _ARGS),
    read=_read,
)
