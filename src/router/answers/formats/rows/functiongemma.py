"""`<start_function_call>call:N{k:<escape>v<escape>}<end_function_call>`: FunctionGemma."""

from __future__ import annotations

from router.answers.formats.format import ArgumentsForm, CallForm, CallReader, Format, Values
from router.answers.formats.pieces.bare_keys import bare_keys_call
from router.answers.formats.source import Steps

_OPEN, _CLOSE, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    yield from reader.attempt(bare_keys_call(reader, _QUOTE, _CLOSE, typed=True))


FORMAT = Format(
    name="functiongemma",
    openers=(_OPEN,),
    closers=(_CLOSE,),
    others=(_QUOTE,),
    signs=lambda template: _OPEN in template,
    form=CallForm(
        before_name=_OPEN + "call:",
        behind_name="{",
        behind_arguments="}" + _CLOSE,
        arguments=ArgumentsForm(
            values=Values.BARE, behind_key=":", between=",", quote=_QUOTE, ends_text=(_QUOTE,), is_typed=True
        ),
    ),
    read=_read,
)
