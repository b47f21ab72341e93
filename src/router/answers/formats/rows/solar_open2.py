"""`<|tool_call:start|>N` and, in lines, `<|tool_arg:start|>K<|tool_arg:value|>V<|tool_arg:end|>`: Solar Open 2."""

from __future__ import annotations

from router.answers.formats.pieces.tagged import Tags, tagged_format

_OPEN, _CLOSE = "<|tool_call:start|>", "<|tool_call:end|>"
_KEY, _VALUE, _END = "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"

FORMAT = tagged_format(
    Tags(call=(_OPEN,), behind_name=("\n",), key=_KEY, behind_key=_VALUE, behind_value=_END, call_end=_CLOSE),
    name="solar_open2",
    openers=(_OPEN,),
    closers=(_CLOSE, _END),
    others=(_KEY, _VALUE),
    signs=lambda template: _OPEN in template,
    behind_name="\n",
    line="\n",
    between="\n",
)
