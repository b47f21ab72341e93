"""Makes Triton's interpreter fit for whole models: it runs with numpy 2.4, and in a third of the time.

Numbers of scalar tensors are made by `int(array)`, where the array has one element but one dimension too many: numpy
2.4 refuses that, earlier versions warn. `item` has always done it.

The language is changed once, not again for each kernel and each function that a kernel calls; sums of integers are not
computed a second time in 64 bits, for an assertion that only Triton's debug mode makes; the table of types is made
once.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

_LANGUAGES = {"triton.language", "triton.language.core"}


def mend() -> None:
    """Change the interpreter of this process. Has no effect where kernels run on a GPU."""
    import triton.runtime.interpreter as interpreter

    adapt(interpreter)


def adapt(interpreter: Any) -> None:
    """Change that module of Triton's. A second call does nothing."""
    if getattr(interpreter, "is_adapted", False):
        return
    interpreter.is_adapted = True
    _adapt_scalars(interpreter)
    _change_language_once(interpreter)
    _keep_types(interpreter)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


def _adapt_scalars(interpreter: Any) -> None:
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _change_language_once(interpreter: Any) -> None:
    original = interpreter._patch_lang
    changed: dict[frozenset[str], Any] = {}

    def patched(function: Any) -> Any:
        modules = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
        names = frozenset(module.__name__ for module in modules) & _LANGUAGES
        if names not in changed:
            original(function)
            changed[names] = interpreter._LangPatchScope()  # with nothing to put back
        return changed[names]

    interpreter._patch_lang = patched


def _keep_types(interpreter: Any) -> None:
    original, language = interpreter._get_np_dtype, interpreter.tl
    known: dict[Any, Any] = {}

    def type_of(dtype: Any) -> Any:
        if isinstance(dtype, language.pointer_type):
            return original(dtype)
        scalar = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        if scalar not in known:
            known[scalar] = original(scalar)
        return known[scalar]

    interpreter._get_np_dtype = type_of
