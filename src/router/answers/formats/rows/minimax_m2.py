"""`<minimax:tool_call><invoke name="N"><parameter name="K">value</parameter></invoke></minimax:tool_call>`:
MiniMax M2."""

from __future__ import annotations

from router.answers.formats.pieces.tagged import Tags, tagged_format

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE = '<invoke name="'

FORMAT = tagged_format(
    Tags(
        call=(_INVOKE,),
        behind_name=('">',),
        key='<parameter name="',
        behind_key='">',
        behind_value="</parameter>",
        call_end="</invoke>",
        ends=(_CLOSE,),
    ),
    name="minimax_m2",
    aliases=("minimax-m2",),
    openers=(_OPEN,),
    closers=(_CLOSE,),
    signs=lambda template: _OPEN in template and _INVOKE in template,
    begin=_OPEN + "\n",
    behind_name='">\n',
    line="\n",
    behind_arguments="</invoke>\n",
    end=_CLOSE,
)
