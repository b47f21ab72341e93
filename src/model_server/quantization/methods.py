"""How a `quantization_config` names the method by which its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Formats of compressed-tensors that are read.
COMPRESSED = ("dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized", "pack-quantized")
# States of compressed-tensors in which weights are whole.
FINISHED = (None, "compressed", "frozen")


def method_of(config: Mapping[str, Any]) -> str:
    """`quant_method`, and where one method has several ways to store of which some are not served, which of them."""
    method = str(config.get("quant_method", "unknown"))
    if method.startswith("modelopt"):
        inner = config.get("quantization")
        return (
            f"modelopt {config.get('quant_algo') or (inner.get('quant_algo') if isinstance(inner, Mapping) else None)}"
        )
    if method != "compressed-tensors":
        return method
    named, sparsity = config.get("format"), config.get("sparsity_config")
    if named is not None and named not in COMPRESSED:
        return f"{method} {named}"
    if config.get("transform_config"):
        return f"{method} with transforms"
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"{method} {sparsity['format']}"
    return method
