"""`<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="N">` and `<steptml:parameter name="K">` for each
argument: Step 3."""

from __future__ import annotations

from router.answers.formats.format import LINE_END
from router.answers.formats.pieces.tagged import Tags, tagged_format

_BEGIN, _END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _SEP, _CALL_END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
_INVOKE, _INVOKE_END = '<steptml:invoke name="', "</steptml:invoke>"

FORMAT = tagged_format(
    Tags(
        call=(_CALL, "function", _SEP, _INVOKE),
        behind_name=('">',),
        key='<steptml:parameter name="',
        behind_key='">',
        behind_value="</steptml:parameter>",
        call_end=_INVOKE_END,
        call_close=_CALL_END,
        ends=(_END,),
    ),
    name="step3",
    openers=(_BEGIN, _CALL),
    closers=(_END, _CALL_END, _INVOKE_END),
    others=(_SEP,),
    signs=lambda template: "steptml:invoke" in template,
    begin=_BEGIN + LINE_END,
    behind_name='">' + LINE_END,
    line=LINE_END,
    behind_arguments=_INVOKE_END + _CALL_END + LINE_END,
    end=_END,
)
