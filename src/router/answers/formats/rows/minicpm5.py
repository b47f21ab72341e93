"""`<function name="N"><param name="K">value</param></function>`: MiniCPM 5."""

from __future__ import annotations

from router.answers.formats.format import LINE_END
from router.answers.formats.pieces.tagged import Tags, tagged_format

_FUNCTION, _END, _PARAM = '<function name="', "</function>", '<param name="'

FORMAT = tagged_format(
    Tags(
        call=(_FUNCTION,),
        behind_name=('">',),
        key=_PARAM,
        behind_key='">',
        behind_value="</param>",
        call_end=_END,
        has_cdata=True,
    ),
    name="minicpm5",
    openers=(_FUNCTION,),
    closers=(_END,),
    signs=lambda template: _FUNCTION in template and "<param name=" in template,
    behind_name='">',
    between=LINE_END,
)
