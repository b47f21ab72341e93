"""`<|tool_call_begin|>functions.N:I<|tool_call_argument_begin|>JSON<|tool_call_end|>`: Kimi K2."""

from __future__ import annotations

import re

from router.answers.formats.format import INDEX, CallForm, CallReader, Format, IdKind
from router.answers.formats.pieces.names import name_before
from router.answers.formats.source import Steps

_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::(\d+))?")


def _read(reader: CallReader, opener: str) -> Steps[None]:
    is_complete = yield from reader.attempt(_call(reader, opener))
    while is_complete:
        is_complete = yield from reader.attempt(_call(reader, ""))
    yield from reader.space_and(*_ENDS)


def _call(reader: CallReader, opener: str) -> Steps[bool]:
    if opener != _CALL and not (yield from reader.space_and(_CALL)):
        return False
    identifier, _ = yield from name_before(reader, _ARGUMENTS)
    found = _ID.fullmatch(identifier)
    if found is None:
        return False
    name = found[1]
    if name.isdecimal() and reader.types.only_name is not None:
        name = reader.types.only_name  # the model has written the number alone
    is_well_formed = identifier.startswith("functions.") and found[2] is not None
    reader.start(name, identifier if is_well_formed else None)
    yield from reader.source.space()
    is_whole = yield from reader.source.json_value(reader.argue)
    yield from reader.space_and(_CALL_END)
    return is_whole


FORMAT = Format(
    name="kimi_k2",
    openers=(*_BEGINS, _CALL),
    closers=(*_ENDS, _CALL_END),
    others=(_ARGUMENTS,),
    ids=IdKind.COUNTED,
    signs=lambda template: any(begin in template for begin in _BEGINS),
    form=CallForm(
        before_name=_CALL + "functions.",
        behind_name=":" + INDEX + _ARGUMENTS,
        behind_arguments=_CALL_END,
        begin=_BEGINS[0],
        end=_ENDS[0],
    ),
    read=_read,
)
