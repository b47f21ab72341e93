"""Which kernels are launched, and whether a variant compiles each of them."""

from __future__ import annotations

import ast
import importlib
import inspect


def forgotten(module: str) -> list[str]:
    """Names of kernels that `module` launches and compiles in no variant."""
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
    variants = loaded.variants() if hasattr(loaded, "variants") else []
    return sorted(launched - {variant.kernel.__name__ for variant in variants})
