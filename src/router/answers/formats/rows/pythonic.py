"""`[N(k=literal, ...), ...]`: Llama 4, small models of Llama 3.2; LFM2 between marks of its own; OLMo 3 with a line for
each call instead of the brackets."""

from __future__ import annotations

from typing import Any

from router.answers.formats.format import ArgumentsForm, CallForm, CallReader, Format, Read, Values
from router.answers.formats.pieces.python_call import python_call
from router.answers.formats.source import Steps

_OPEN, _CLOSE = "<|python_start|>", "<|python_end|>"
_LFM_OPEN, _LFM_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_OLMO_OPEN, _OLMO_CLOSE = "<function_calls>", "</function_calls>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    while (yield from _list(reader, only_offered=not opener)):
        pass
    yield from reader.space_and(_CLOSE, _LFM_CLOSE)


def _list(reader: CallReader, *, only_offered: bool) -> Steps[bool]:
    """A list, which another may follow."""
    position, before = reader.source.hold(), reader.num_started
    if not (yield from reader.space_and("[")):
        reader.source.rewind(position)
        return False
    mark = ","
    while mark == "," and (yield from reader.attempt(python_call(reader, only_offered=only_offered))):
        mark = yield from reader.space_and(",", "]")
    if reader.num_started == before:
        reader.source.rewind(position)
    return mark == "]"


def _read_lines(reader: CallReader, opener: str) -> Steps[None]:
    before = reader.num_started
    while (yield from reader.attempt(python_call(reader))):
        yield from reader.space_and(",")
    if reader.num_started > before:
        yield from reader.space_and(_OLMO_CLOSE)


def _format(begin: str, end: str, *, between: str = ", ", read: Read = _read, **names: Any) -> Format:
    """Make a format with marks around forced calls."""
    return Format(
        form=CallForm(
            before_name="",
            behind_name="(",
            behind_arguments=")",
            begin=begin,
            between=between,
            end=end,
            arguments=ArgumentsForm(
                values=Values.PYTHON, behind_key="=", between=", ", names=r"(?!.*\.call$)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
            ),
        ),
        read=read,
        **names,
    )


FORMAT = _format(
    "[",
    "]",
    name="pythonic",
    aliases=("llama4_pythonic",),
    openers=(_OPEN,),
    starts=("[",),
    closers=(_CLOSE,),
    signs=lambda template: _OPEN in template or "func_name1(params_name1" in template,
)
LFM2 = _format(
    _LFM_OPEN + "[",
    "]" + _LFM_CLOSE,
    name="lfm2",
    openers=(_LFM_OPEN,),
    closers=(_LFM_CLOSE,),
    signs=lambda template: _LFM_OPEN in template,
)
OLMO3 = _format(
    _OLMO_OPEN,
    _OLMO_CLOSE,
    between="\n",
    read=_read_lines,
    name="olmo3",
    openers=(_OLMO_OPEN,),
    closers=(_OLMO_CLOSE,),
    signs=lambda template: _OLMO_OPEN in template and "<invoke" not in template,
)
