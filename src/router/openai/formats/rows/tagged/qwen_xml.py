"""`<tool_call><function=N><parameter=K>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen 3.5; Seed-OSS
with `<seed:tool_call>` around it."""

from __future__ import annotations

from typing import Any

from router.openai.formats.format import ArgumentsForm, CallForm, CallReader, Format, ObjectWriter, Values
from router.openai.formats.pieces.names import name_before
from router.openai.formats.pieces.tagged import tagged_value
from router.openai.formats.source import Steps

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SEED_OPEN, _SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"
_FUNCTION, _END = "<function=", "</function>"
_PARAMETER, _END_OF_VALUE = "<parameter=", "</parameter>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    yield from reader.attempt(_call(reader, opener))
    yield from reader.space_and(_CLOSE, _SEED_CLOSE)


def _call(reader: CallReader, opener: str) -> Steps[bool]:
    if opener != _FUNCTION and not (yield from reader.space_and(_FUNCTION)):
        return False
    name, _ = yield from name_before(reader, ">")
    if not name:
        return False
    reader.start(name)
    writer = ObjectWriter(reader)
    while (mark := (yield from reader.space_and(_PARAMETER, _END))) == _PARAMETER:
        key = yield from reader.source.until(">")
        if key is None:
            return False
        writer.key(key[0].strip())
        # One line end at each end of a value belongs to the format.
        yield from reader.source.literal("\n")
        types = reader.types.of(name, reader.visible(key[0].strip()))
        if not (yield from tagged_value(reader, writer, types, "\n" + _END_OF_VALUE, _END_OF_VALUE)):
            return False
    if mark:
        writer.end()
    return bool(mark)


def _format(opens: str, closes: str, **names: Any) -> Format:
    return Format(
        openers=(opens, _FUNCTION),
        closers=(closes, _END),
        form=CallForm(
            before_name=opens + "\n" + _FUNCTION,
            behind_name=">\n",
            behind_arguments=_END + "\n" + closes,
            between="\n",
            arguments=ArgumentsForm(
                values=Values.TAGGED,
                before_key=_PARAMETER,
                behind_key=">\n",
                behind_value="\n" + _END_OF_VALUE + "\n",
                ends_text=(_END_OF_VALUE,),
            ),
        ),
        read=_read,
        **names,
    )


FORMAT = _format(
    _OPEN,
    _CLOSE,
    name="qwen_xml",
    aliases=("qwen3_coder", "qwen3_xml", "nemotron_v3", "step3p5", "mimo"),
    signs=lambda template: _FUNCTION in template and _PARAMETER in template,
)
SEED = _format(
    _SEED_OPEN,
    _SEED_CLOSE,
    name="seed_xml",
    aliases=("seed_oss",),
    signs=lambda template: _SEED_OPEN in template and _FUNCTION in template,
)
