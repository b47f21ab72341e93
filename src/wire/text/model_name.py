"""A model's shown name, and its quantization's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_LOCAL = ("/", "./", "../", "~")
_GGUF = ".gguf"


def short_name(model_id: str) -> str:
    """Return the last part of a path without `.gguf`, and any other model id as it is."""
    is_path = model_id.startswith(_LOCAL) or os.path.exists(model_id)
    if not is_path and not model_id.lower().endswith(_GGUF):
        return model_id
    name = os.path.basename(os.path.realpath(os.path.expanduser(model_id)) if is_path else model_id)
    name = name[: -len(_GGUF)] if name.lower().endswith(_GGUF) else name
    return name or model_id


def quantization_name(config: Mapping[str, Any]) -> str | None:
    """Return the quantization's name, as `Q4_K_M` or `gptq, 4 bits`, if any."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return None
    if isinstance(file_type := said.get("file_type"), str):
        return file_type
    method, bits = said.get("quant_method"), said.get("bits", said.get("w_bit"))
    if not isinstance(method, str):
        return None
    return f"{method}, {bits} bits" if isinstance(bits, int) else method
