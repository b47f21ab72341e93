"""`[N(k=literal, ...), ...]`: Llama 4, small models of Llama 3.2."""

from __future__ import annotations

from router.openai.formats.format import ArgumentsForm, CallForm, CallReader, Format, Values
from router.openai.formats.pieces.python_call import python_call
from router.openai.formats.source import Steps

_OPEN, _CLOSE = "<|python_start|>", "<|python_end|>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    if not (yield from reader.space_and("[")):
        return
    while (yield from reader.attempt(python_call(reader, only_offered=not opener))):
        if (yield from reader.space_and(",", "]")) != ",":
            break
    yield from reader.space_and(_CLOSE)


FORMAT = Format(
    name="pythonic",
    aliases=("llama4_pythonic",),
    openers=(_OPEN,),
    starts=("[",),
    closers=(_CLOSE,),
    signs=lambda template: _OPEN in template or "func_name1(params_name1" in template,
    form=CallForm(
        before_name="",
        behind_name="(",
        behind_arguments=")",
        begin="[",
        between=", ",
        end="]",
        arguments=ArgumentsForm(
            values=Values.PYTHON, behind_key="=", between=", ", names=r"(?!.*\.call$)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
        ),
    ),
    read=_read,
)
