"""`function call<|role_sep|>{"name": N, "arguments": JSON}`, a message behind the answer: GigaChat 3; with
`<|function_call|>` instead: GigaChat 3.1."""

from __future__ import annotations

from typing import Any

from router.answers.formats.format import CallForm, CallReader, Format
from router.answers.formats.pieces.json_call import json_call
from router.answers.formats.source import Steps

_SEPARATOR, _ROLE_END = "<|message_sep|>\n\n", "<|role_sep|>\n"
_ROLE, _CALL = "function call" + _ROLE_END, "<|function_call|>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    if (yield from reader.attempt(_call(reader))):
        yield from reader.space_and(_SEPARATOR, _SEPARATOR.rstrip())


def _call(reader: CallReader) -> Steps[bool]:
    yield from reader.source.space()
    return (yield from json_call(reader))


def _format(begin: str, **names: Any) -> Format:
    return Format(
        closers=(_SEPARATOR, _SEPARATOR.rstrip()),
        is_one=True,
        form=CallForm(
            begin=begin,
            before_name='{"name": "',
            behind_name='", "arguments": ',
            behind_arguments="}",
            trigger=_ROLE_END,
        ),
        read=_read,
        **names,
    )


ROLE = _format(
    _SEPARATOR + _ROLE,
    name="gigachat3",
    openers=(_SEPARATOR + _ROLE, _ROLE),
    others=(_ROLE_END,),
    signs=lambda template: "function call" in template and "role_sep" in template and _CALL not in template,
)
MARK = _format(
    _CALL, name="gigachat31", aliases=("gigachat3",), openers=(_CALL,), signs=lambda template: _CALL in template
)
