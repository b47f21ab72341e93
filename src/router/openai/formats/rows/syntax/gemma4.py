"""`<|tool_call>call:N{k:<|"|>text<|"|>,n:3}<tool_call|>`: Gemma 4."""

from __future__ import annotations

from router.openai.formats.format import CallReader, Format
from router.openai.formats.pieces.bare_keys import bare_keys_call
from router.openai.formats.source import Steps

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def _read(reader: CallReader, opener: str) -> Steps[None]:
    yield from reader.attempt(bare_keys_call(reader, _QUOTE, _CLOSE, typed=False))


FORMAT = Format(
    name="gemma4",
    openers=(_OPEN,),
    closers=(_CLOSE,),
    others=(_QUOTE,),
    signs=lambda template: _OPEN in template,
    read=_read,
)
