"""`<tool_calls><tool_call>N<tool_sep><arg_key>K</arg_key><arg_value>V</arg_value></tool_call></tool_calls>`: Hy3, whose
published models have `:opensource` in each of the marks."""

from __future__ import annotations

from typing import Any

from router.answers.formats.format import Format
from router.answers.formats.pieces.tagged import Tags, tagged_format

SUFFIX = ":opensource"


def _format(suffix: str, **names: Any) -> Format:
    begin, end, call, call_end, separator, key, key_end, value, value_end = (
        f"<{mark}{suffix}>"
        for mark in (
            "tool_calls", "/tool_calls", "tool_call", "/tool_call", "tool_sep",
            "arg_key", "/arg_key", "arg_value", "/arg_value",
        )
    )  # fmt: skip
    return tagged_format(
        Tags(
            call=(call,),
            behind_name=(separator,),
            key=key,
            behind_key=key_end,
            value=value,
            behind_value=value_end,
            call_end=call_end,
            ends=(end,),
        ),
        openers=(begin, call),
        closers=(end, call_end, value_end),
        others=(separator, key, key_end, value),
        signs=lambda template: separator in template,
        begin=begin + "\n",
        behind_name=separator + "\n",
        line="\n",
        behind_arguments=call_end + "\n",
        end=end,
        **names,
    )


OPEN = _format(SUFFIX, name="hy_v3_opensource", aliases=("hy_v3", "hunyuan"))
FORMAT = _format("", name="hy_v3", aliases=("hunyuan",))
