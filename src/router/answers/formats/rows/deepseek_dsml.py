"""`<｜DSML｜invoke name="N"><｜DSML｜parameter name="K" string="true">value</｜DSML｜parameter>`: DeepSeek V3.2 and V4,
which differ in the mark around the calls."""

from __future__ import annotations

from typing import Any

from router.answers.formats.format import KIND, ArgumentsForm, CallForm, CallReader, Format, ObjectWriter, Values
from router.answers.formats.pieces.names import name_before
from router.answers.formats.pieces.tagged import Tags, narrowed, others, tagged_value
from router.answers.formats.schema_types import JSON_TYPES
from router.answers.formats.source import Steps

_DSML = "｜DSML｜"
_OPENERS = (f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>")
_CLOSERS = (f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>")
_INVOKE, _END = f'<{_DSML}invoke name="', f"</{_DSML}invoke>"
_PARAMETER, _END_OF_VALUE = f'<{_DSML}parameter name="', f"</{_DSML}parameter>"

_TAGS = Tags(
    call=(_INVOKE,),
    behind_name=('">',),
    key=_PARAMETER,
    behind_key='" string="',
    behind_value=_END_OF_VALUE,
    call_end=_END,
    ends=_CLOSERS,
)


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
    writer, given = ObjectWriter(reader), set[str]()
    while (mark := (yield from reader.space_and(_PARAMETER, _END))) == _PARAMETER:
        key = yield from reader.source.until('" string="')
        kind = yield from reader.source.literal('true">', 'false">')
        if key is None or not kind:
            return False
        writer.key(key[0])
        given.add(key[0])
        types = reader.types.of(name, reader.visible(key[0]))
        types = narrowed(types, is_text=kind.startswith("true"))
        if not (yield from tagged_value(reader, writer, _TAGS, others(reader, name, given), types)):
            return False
    if mark:
        writer.end()
    return bool(mark)


def _format(number: int, **names: Any) -> Format:
    """`number`: of the mark around the calls."""
    return Format(
        openers=(*_OPENERS, _INVOKE),
        closers=(*_CLOSERS, _END),
        others=(_DSML,),
        form=CallForm(
            before_name=_INVOKE,
            behind_name='">\n',
            behind_arguments=_END + "\n",
            begin=_OPENERS[number] + "\n",
            end=_CLOSERS[number],
            arguments=ArgumentsForm(
                values=Values.TAGGED,
                before_key=_PARAMETER,
                behind_key=f'" string="{KIND}">',
                behind_value=_END_OF_VALUE + "\n",
                ends_text=(_END_OF_VALUE,),
                kinds=dict.fromkeys(JSON_TYPES, "false") | {"string": "true"},
            ),
        ),
        read=_read,
        **names,
    )


FORMAT = _format(0, name="deepseek_dsml", aliases=("deepseek_v32",), signs=lambda template: "DSML" in template)
V4 = _format(1, name="deepseek_v4", signs=lambda template: "DSML" in template and "tool_calls>" in template)
