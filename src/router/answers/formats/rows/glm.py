"""`<tool_call>N<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`: GLM 4.5 to 5; LongCat with `longcat_` before
each of the names."""

from __future__ import annotations

from typing import Any

from router.answers.formats.format import LINE_END, Format
from router.answers.formats.pieces.tagged import Tags, tagged_format


def _format(prefix: str, **names: Any) -> Format:
    opens, closes, key, value = (
        f"<{mark}>" for mark in (f"{prefix}tool_call", f"/{prefix}tool_call", f"{prefix}arg_key", f"{prefix}arg_value")
    )
    key_end, value_end = key.replace("<", "</"), value.replace("<", "</")
    return tagged_format(
        Tags(
            call=(opens,),
            behind_name=("\n",),
            key=key,
            behind_key=key_end,
            value=value,
            behind_value=value_end,
            call_end=closes,
        ),
        openers=(opens,),
        closers=(closes, value_end),
        others=(key, key_end, value),
        signs=lambda template: key in template,
        behind_name=LINE_END,
        line=LINE_END,
        between=LINE_END,
        **names,
    )


FORMAT = _format("", name="glm", aliases=("glm45", "glm47", "glm4"))
LONGCAT = _format("longcat_", name="longcat_args", aliases=("longcat",))
