"""`<tool_call><function=N><parameter=K>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen 3.5; Seed-OSS
with `<seed:tool_call>` around it."""

from __future__ import annotations

from typing import Any

from router.answers.formats.format import Format
from router.answers.formats.pieces.tagged import Tags, tagged_format

_OPEN, _SEED_OPEN = "<tool_call>", "<seed:tool_call>"
_FUNCTION, _END, _PARAMETER = "<function=", "</function>", "<parameter="


def _format(opens: str, **names: Any) -> Format:
    closes = opens.replace("<", "</")
    return tagged_format(
        Tags(
            call=(opens, _FUNCTION),
            behind_name=(">",),
            key=_PARAMETER,
            behind_key=">",
            behind_value="</parameter>",
            call_end=_END,
            call_close=closes,
            has_lines=True,
        ),
        openers=(opens, _FUNCTION),
        closers=(closes, _END),
        before_name=opens + "\n" + _FUNCTION,
        behind_name=">\n",
        line="\n",
        behind_arguments=_END + "\n" + closes,
        between="\n",
        **names,
    )


FORMAT = _format(
    _OPEN,
    name="qwen_xml",
    aliases=("qwen3_coder", "qwen3_xml", "nemotron_v3", "step3p5", "mimo"),
    signs=lambda template: _FUNCTION in template and _PARAMETER in template,
)
SEED = _format(
    _SEED_OPEN,
    name="seed_xml",
    aliases=("seed_oss",),
    signs=lambda template: _SEED_OPEN in template and _FUNCTION in template,
)
