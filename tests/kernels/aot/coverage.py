"""Which kernels are launched, and whether a variant compiles each of them."""

from __future__ import annotations

import ast
import importlib
import inspect

from aot.variant import Variant


def variants_of(listed: str | None) -> list[Variant]:
    """What a module lists; nothing if there is none, or it has no `variants`."""
    found = None if listed is None else getattr(importlib.import_module(listed), "variants", None)
    return [] if found is None else list(found())


def forgotten(module: str, listed: str | None) -> list[str]:
    """Names of kernels that `module` launches and no variant of the module `listed` compiles."""
    from triton.runtime.jit import JITFunction

    loaded = importlib.import_module(module)
    launched = {
        node.func.value.id
        for node in ast.walk(ast.parse(inspect.getsource(loaded)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and isinstance(getattr(loaded, node.func.value.id, None), JITFunction)
    }
    return sorted(launched - {variant.kernel.__name__ for variant in variants_of(listed)})
