"""`<tool_call>N<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`: GLM 4.5 to 5."""

from __future__ import annotations

from router.openai.formats.format import LINE_END, ArgumentsForm, CallForm, CallReader, Format, ObjectWriter, Values
from router.openai.formats.pieces.names import name_before
from router.openai.formats.pieces.tagged import tagged_value
from router.openai.formats.source import Steps

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _END_OF_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_OF_VALUE = "<arg_value>", "</arg_value>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    yield from reader.attempt(_call(reader))


def _call(reader: CallReader) -> Steps[bool]:
    yield from reader.source.space()
    name, mark = yield from name_before(reader, "\n", _KEY, _CLOSE)
    if not name:
        return False
    reader.start(name)
    writer = ObjectWriter(reader)
    if mark == "\n":
        mark = yield from reader.space_and(_KEY, _CLOSE)
    while mark == _KEY:
        key = yield from reader.source.until(reader.mark(_END_OF_KEY))
        if key is None or not (yield from reader.space_and(_VALUE)):
            return False
        writer.key(key[0].strip())
        types = reader.types.of(name, reader.visible(key[0].strip()))
        if not (yield from tagged_value(reader, writer, types, _END_OF_VALUE)):
            return False
        mark = yield from reader.space_and(_KEY, _CLOSE)
    if mark:
        writer.end()
    return bool(mark)


FORMAT = Format(
    name="glm",
    aliases=("glm45", "glm47", "glm4"),
    openers=(_OPEN,),
    closers=(_CLOSE, _END_OF_VALUE),
    others=(_KEY, _END_OF_KEY, _VALUE),
    signs=lambda template: _KEY in template,
    form=CallForm(
        before_name=_OPEN,
        behind_name=LINE_END,
        behind_arguments=_CLOSE,
        between=LINE_END,
        arguments=ArgumentsForm(
            values=Values.TAGGED,
            before_key=_KEY,
            behind_key=_END_OF_KEY + LINE_END + _VALUE,
            behind_value=_END_OF_VALUE + LINE_END,
            ends_text=(_END_OF_VALUE,),
        ),
    ),
    read=_read,
)
