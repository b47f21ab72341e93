"""`<|plamo:begin_tool_name:plamo|>N<|plamo:end_tool_name:plamo|>` and the arguments as JSON: PLaMo 3."""

from __future__ import annotations

from router.answers.formats.format import CallForm, CallReader, Format
from router.answers.formats.pieces.names import name_before
from router.answers.formats.source import Steps

_PARTS = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>")
"""The tokens of which the marks are made."""
_JSON = "<|plamo:constrain|>json"
_MESSAGE = "<|plamo:msg|>"


def _marks(name: str) -> tuple[str, str]:
    return f"<|plamo:begin_{name}:plamo|>", f"<|plamo:end_{name}:plamo|>"


_BEGIN, _END = _marks("tool_requests")
_CALL, _CALL_END = _marks("tool_request")
_NAME, _NAME_END = _marks("tool_name")
_ARGUMENTS, _ARGUMENTS_END = _marks("tool_arguments")


def _read(reader: CallReader, opener: str) -> Steps[None]:
    yield from reader.calls(_call, _END)


def _call(reader: CallReader) -> Steps[bool]:
    for mark in (_CALL, _NAME):
        if not (yield from reader.space_and(mark)):
            return False
    name, _ = yield from name_before(reader, _NAME_END)
    if not name:
        return False
    reader.start(name)
    if not (yield from reader.space_and(_ARGUMENTS)):
        return False
    yield from reader.space_and(_JSON)
    yield from reader.space_and(_MESSAGE)
    yield from reader.source.space()
    is_whole = yield from reader.source.json_value(reader.argue)
    for mark in (_ARGUMENTS_END, _CALL_END):
        yield from reader.space_and(mark)
    return is_whole


FORMAT = Format(
    name="plamo3",
    openers=(_BEGIN,),
    closers=(_END, _CALL_END),
    others=_PARTS,
    signs=lambda template: _BEGIN in template,
    form=CallForm(
        before_name=_CALL + _NAME,
        behind_name=_NAME_END + _ARGUMENTS + _JSON + _MESSAGE,
        behind_arguments=_ARGUMENTS_END + _CALL_END,
        begin=_BEGIN,
        end=_END,
        trigger=None,
    ),
    read=_read,
)
