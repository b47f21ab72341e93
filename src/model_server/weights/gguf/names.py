"""From GGUF names to transformers', and what some rows and numbers need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from model_server.weights.gguf.header import GgufHeader, read_gguf
from model_server.weights.header import Header, Stored

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the config."""

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_SANDWICH = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PACKED = {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp's architecture differs from family `model_type`."""

    model_type: str
    layer: Mapping[str, str]
    # Rows of q and k are in rotated pairs.
    adjacent: bool = False
    # What norms hold beside the family's numbers.
    added: float = 0.0


ARCHITECTURES = {
    "llama": Architecture("llama", _LAYER, adjacent=True),
    "qwen2": Architecture("qwen2", _LAYER),
    "qwen3": Architecture("qwen3", _LAYER),
    "gemma": Architecture("gemma", _LAYER, added=1.0),
    "gemma2": Architecture("gemma2", _SANDWICH, added=1.0),
    "gemma3": Architecture("gemma3_text", _SANDWICH, added=1.0),
    "phi3": Architecture("phi3", _PACKED),
}


def architecture_of(metadata: Mapping[str, Any], path: Path) -> Architecture:
    """Return a served architecture."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise StartupError(f"{path} lacks the metadata `general.architecture`, a text")
    if metadata.get(f"{name}.expert_count", 0):
        raise StartupError(f"{path} holds a mixture of experts, which is not served from GGUF files")
    if name not in ARCHITECTURES:
        raise StartupError(
            f"{path} is of the architecture {name!r:.80}, which is not served from GGUF files; served are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def read_named(path: Path) -> Header:
    """Read tensors by transformers' names."""
    header = read_gguf(path)
    return Header(named_tensors(header, path))


def named_tensors(header: GgufHeader, path: Path) -> dict[str, Stored]:
    """Rename tensors, without factors of rotations."""
    layer = architecture_of(header.metadata, path).layer
    found: dict[str, Stored] = {}
    for name, stored in header.tensors.items():
        if name not in FACTORS:
            found[_named(name, layer, path)] = stored
    return found


def _named(name: str, layer: Mapping[str, str], path: Path) -> str:
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in layer:
        raise StartupError(f"{path} holds the tensor {name!r:.200}, which is not served in its architecture")
    return f"model.layers.{int(match[1])}.{layer[match[2]]}.{match[3]}"
