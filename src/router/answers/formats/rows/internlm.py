"""`<|action_start|><|plugin|>{"name": N, "parameters": JSON}<|action_end|>`: InternLM 2, Intern-S1."""

from __future__ import annotations

from router.answers.formats.format import CallForm, CallReader, Format
from router.answers.formats.pieces.json_call import json_call
from router.answers.formats.source import Steps

_START, _PLUGIN, _END = "<|action_start|>", "<|plugin|>", "<|action_end|>"


def _read(reader: CallReader, opener: str) -> Steps[None]:
    if (yield from reader.attempt(_call(reader))):
        yield from reader.space_and(_END)


def _call(reader: CallReader) -> Steps[bool]:
    if not (yield from reader.space_and(_PLUGIN)):
        return False
    yield from reader.source.space()
    return (yield from json_call(reader))


FORMAT = Format(
    name="internlm",
    aliases=("internlm2", "interns1"),
    openers=(_START,),
    closers=(_END,),
    others=(_PLUGIN,),
    signs=lambda template: _START in template,
    form=CallForm(
        before_name=_START + _PLUGIN + '\n{"name": "',
        behind_name='", "parameters": ',
        behind_arguments="}" + _END,
    ),
    read=_read,
)
