"""`<｜DSML｜invoke name="N"><｜DSML｜parameter name="K" string="true">value</｜DSML｜parameter>`: DeepSeek V3.2, V4."""

from __future__ import annotations

from router.openai.formats.format import CallForm, CallReader, Format, ObjectWriter
from router.openai.formats.pieces.names import name_before
from router.openai.formats.pieces.tagged import STRING, tagged_value
from router.openai.formats.source import Steps

_DSML = "｜DSML｜"
_OPENERS = (f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>")
_CLOSERS = (f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>")
_INVOKE, _END = f'<{_DSML}invoke name="', f"</{_DSML}invoke>"
_PARAMETER, _END_OF_VALUE = f'<{_DSML}parameter name="', f"</{_DSML}parameter>"
_NO_STRING = frozenset({"number", "integer", "boolean", "object", "array", "null"})


def _read(reader: CallReader, opener: str) -> Steps[None]:
    is_complete = yield from reader.attempt(_call(reader, opener))
    while is_complete:
        is_complete = yield from reader.attempt(_call(reader, ""))
    yield from reader.space_and(*_CLOSERS)


def _call(reader: CallReader, opener: str) -> Steps[bool]:
    if opener != _INVOKE and not (yield from reader.space_and(_INVOKE)):
        return False
    name, _ = yield from name_before(reader, '">')
    if not name:
        return False
    reader.start(name)
    yield from reader.source.space()
    if (yield from reader.source.peek()) == "{":
        is_whole = yield from reader.source.json_value(reader.argue)
        return is_whole and bool((yield from reader.space_and(_END)))
    writer = ObjectWriter(reader)
    while (mark := (yield from reader.space_and(_PARAMETER, _END))) == _PARAMETER:
        key = yield from reader.source.until('" string="')
        kind = yield from reader.source.literal('true">', 'false">')
        if key is None or not kind:
            return False
        writer.key(key[0])
        types = STRING if kind.startswith("true") else _NO_STRING
        if not (yield from tagged_value(reader, writer, types, _END_OF_VALUE)):
            return False
    if mark:
        writer.end()
    return bool(mark)


FORMAT = Format(
    name="deepseek_dsml",
    aliases=("deepseek_v32", "deepseek_v4"),
    openers=(*_OPENERS, _INVOKE),
    closers=(*_CLOSERS, _END),
    others=(_DSML,),
    signs=lambda template: "DSML" in template,
    form=CallForm(
        before_name=_INVOKE,
        behind_name='">\n',
        behind_arguments="\n" + _END + "\n",
        begin=_OPENERS[0] + "\n",
        end=_CLOSERS[0],
    ),
    read=_read,
)
