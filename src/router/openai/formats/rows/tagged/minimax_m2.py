"""`<minimax:tool_call><invoke name="N"><parameter name="K">value</parameter></invoke></minimax:tool_call>`:
MiniMax M2."""

from __future__ import annotations

from router.openai.formats.format import ArgumentsForm, CallForm, CallReader, Format, ObjectWriter, Values
from router.openai.formats.pieces.names import name_before
from router.openai.formats.pieces.tagged import tagged_value
from router.openai.formats.source import Steps

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _END = '<invoke name="', "</invoke>"
_PARAMETER, _END_OF_VALUE = '<parameter name="', "</parameter>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    before = reader.num_started
    while (yield from reader.attempt(_call(reader))):
        pass
    if reader.num_started > before:
        yield from reader.space_and(_CLOSE)


def _call(reader: CallReader) -> Steps[bool]:
    if not (yield from reader.space_and(_INVOKE)):
        return False
    name, _ = yield from name_before(reader, '">')
    if not name:
        return False
    reader.start(name)
    writer = ObjectWriter(reader)
    while (mark := (yield from reader.space_and(_PARAMETER, _END))) == _PARAMETER:
        key = yield from reader.source.until('">')
        if key is None:
            return False
        writer.key(key[0])
        types = reader.types.of(name, reader.visible(key[0]))
        if not (yield from tagged_value(reader, writer, types, _END_OF_VALUE)):
            return False
    if mark:
        writer.end()
    return bool(mark)


FORMAT = Format(
    name="minimax_m2",
    openers=(_OPEN,),
    closers=(_CLOSE,),
    signs=lambda template: _OPEN in template and _INVOKE in template,
    form=CallForm(
        before_name=_INVOKE,
        behind_name='">\n',
        behind_arguments=_END + "\n",
        begin=_OPEN + "\n",
        end=_CLOSE,
        arguments=ArgumentsForm(
            values=Values.TAGGED,
            before_key=_PARAMETER,
            behind_key='">',
            behind_value=_END_OF_VALUE + "\n",
            ends_text=(_END_OF_VALUE,),
        ),
    ),
    read=_read,
)
