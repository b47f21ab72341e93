"""Lets Triton 3.6's interpreter run loops over run-time bounds with numpy 2.4 and later.

It makes a number of a scalar tensor by `int(array)`, where the array has one element but one dimension too many: numpy
2.4 refuses that, earlier ones warn. `item` has always done it.
"""

from __future__ import annotations

from typing import Any

import triton.runtime.interpreter as interpreter


def mend() -> None:
    """Has no effect where kernels run on a card."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
