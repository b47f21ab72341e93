"""`<|open|>call tool="N" index="1"<|sep|>` and, per argument, `<|open|>argument key="K" type="string"<|sep|>`: Kimi
K3."""

from __future__ import annotations

import re

from router.answers.formats.format import (
    INDEX,
    KIND,
    ArgumentsForm,
    CallForm,
    CallReader,
    Format,
    ObjectWriter,
    Values,
)
from router.answers.formats.pieces.names import name_before
from router.answers.formats.pieces.tagged import Tags, narrowed, others, tagged_value
from router.answers.formats.source import Steps

_TOKENS = _OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_BEGIN, _END = f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}"
_CALL, _CALL_END = f'{_OPEN}call tool="', f"{_CLOSE}call{_SEP}"
_ARGUMENT, _ARGUMENT_END = f'{_OPEN}argument key="', f"{_CLOSE}argument{_SEP}"
_JSON, _JSON_END = f'{_OPEN}json type="object"{_SEP}', f"{_CLOSE}json{_SEP}"
_TAGS = Tags(
    call=(_CALL,),
    behind_name=('"',),
    key=_ARGUMENT,
    behind_key='"',
    behind_value=_ARGUMENT_END,
    call_end=_CALL_END,
    ends=(_END,),
)
_IS_TEXT = re.compile(r'(?!.*\stype="(?!string"))', re.DOTALL)
"""What may be behind a key whose value is a text, which is what it is without a type."""


def _read(reader: CallReader, opener: str) -> Steps[None]:
    yield from reader.calls(_call, _END)


def _call(reader: CallReader) -> Steps[bool]:
    if not (yield from reader.space_and(_CALL)):
        return False
    name, _ = yield from name_before(reader, '"')
    if not name or (yield from reader.source.until(reader.mark(_SEP))) is None:
        return False
    reader.start(_unescaped(name))
    writer, given = ObjectWriter(reader), set[str]()
    while (mark := (yield from reader.space_and(_ARGUMENT, _JSON, _CALL_END))) == _ARGUMENT:
        key = yield from reader.source.until('"')
        behind = key and (yield from reader.source.until(reader.mark(_SEP)))
        if not key or not behind:
            return False
        writer.key(_unescaped(key[0]))
        given.add(key[0])
        types = reader.types.of(_unescaped(name), reader.visible(_unescaped(key[0])))
        types = narrowed(types, is_text=_IS_TEXT.match(behind[0]) is not None)
        if not (yield from tagged_value(reader, writer, _TAGS, others(reader, name, given), types)):
            return False
    if mark == _JSON and not given:
        yield from reader.source.space()
        is_object = (yield from reader.source.peek()) == "{"
        is_whole = is_object and (yield from reader.source.json_value(reader.argue))
        yield from reader.space_and(_JSON_END)
        return is_whole and bool((yield from reader.space_and(_CALL_END)))
    if mark == _CALL_END:
        writer.end()
    return mark == _CALL_END


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


FORMAT = Format(
    name="kimi_k3",
    openers=(_BEGIN,),
    closers=(_END, _CALL_END, _ARGUMENT_END, f"{_CLOSE}response{_SEP}", f"{_CLOSE}message{_SEP}"),
    others=_TOKENS,
    signs=lambda template: _OPEN in template and re.search(r"\bargument\b", template) is not None,
    form=CallForm(
        before_name=_CALL,
        behind_name=f'" index="{INDEX}"{_SEP}',
        behind_arguments=_CALL_END,
        begin=_BEGIN,
        end=_END,
        trigger=None,
        answers=f"{_OPEN}response{_SEP}",
        arguments=ArgumentsForm(
            values=Values.TAGGED,
            before_key=_ARGUMENT,
            behind_key=f'" type="{KIND}"{_SEP}',
            behind_value=_ARGUMENT_END,
            ends_text=(_ARGUMENT_END,),
            kinds={kind: kind for kind in ("string", "number", "boolean", "null", "object", "array")}
            | {"integer": "number"},
        ),
    ),
    read=_read,
)
