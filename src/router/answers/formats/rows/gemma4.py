"""`<|tool_call>call:N{k:<|"|>text<|"|>,n:3}<tool_call|>`: Gemma 4."""

from __future__ import annotations

from router.answers.formats.format import ArgumentsForm, CallForm, CallReader, Format, Values
from router.answers.formats.pieces.bare_keys import bare_keys_call
from router.answers.formats.source import Steps

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def _read(reader: CallReader, opener: str) -> Steps[None]:
    yield from reader.attempt(bare_keys_call(reader, _QUOTE, _CLOSE, typed=False))


FORMAT = Format(
    name="gemma4",
    openers=(_OPEN,),
    closers=(_CLOSE,),
    others=(_QUOTE,),
    signs=lambda template: _OPEN in template,
    form=CallForm(
        before_name=_OPEN + "call:",
        behind_name="{",
        behind_arguments="}" + _CLOSE,
        arguments=ArgumentsForm(
            values=Values.BARE, behind_key=":", between=",", quote=_QUOTE, ends_text=(_QUOTE,), is_typed=False
        ),
    ),
    read=_read,
)
