"""Parts that config.json affirms or denies (biases, norms), and that other layers have, against the tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.weights.leftover import layer_of, natural_order

_ATTENTION = r"\.(self_attn|self_attention|attention|attn)\.(?!\w*norm)\w+\.bias$"
_HEAD_NORMS = r"\.(q|k)_(layer)?norm(\.norms\.\d+)?\.weight$"
_BIASED = (
    "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "granite",
    "granitemoe", "hy_v3", "kimi_linear", "llama", "llama4_text", "mistral4", "olmo2", "phimoe", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3",
)  # fmt: skip
_PARTS: dict[str, tuple[tuple[str, ...], str]] = {
    "attention_bias": (_BIASED, _ATTENTION),
    "conv_bias": (("lfm2", "lfm2_moe"), r"\.conv\.\w+\.bias$"),
    "qkv_bias": (("qwen2_moe",), r"\.(q|k|v)_proj\.bias$"),
    "use_qkv_bias": (("stablelm",), r"\.(q|k|v)_proj\.bias$"),
    "mlp_bias": (("granite", "hy_v3", "llama", "smollm3"), r"\.mlp\.\w+\.bias$"),
    "lm_head_bias": (("phimoe",), r"^lm_head\.bias$"),
    "qk_layernorm": (("phi", "stablelm"), _HEAD_NORMS),
    "use_qk_norm": (("cohere", "glm4_moe"), _HEAD_NORMS),
}
"""Field -> the types whose modelling reads it, and the names of the tensors that it says are there."""
# A missing norm is not the same as one of ones, as a missing bias is as one of zeros.
_NEEDED = ("qk_layernorm", "use_qk_norm")


def check_stated_parts(config: ModelConfig, tensors: Iterable[str]) -> None:
    """Refuse contradictions between config.json and plain weights, naming field and tensor.

    Args:
        tensors: Names; writers of quantized weights add biases of zeros, so only plain ones.
    """
    stored = tuple(tensors)
    for field, (types, pattern) in _PARTS.items():
        said = config.get(field)
        if not isinstance(said, bool) or config.model_type not in types:
            continue
        found = next((name for name in stored if re.search(pattern, name)), None)
        if not said and found is not None:
            raise StartupError(
                f"config.json: `{field}` is false, but the files hold {found}: set it to true, or give the files that "
                "belong to this config.json"
            )
        if said and found is None and field in _NEEDED:
            raise StartupError(
                f"config.json: `{field}` is true, but the files hold no norms of queries and keys: set it to false, or "
                "give the files that belong to this config.json"
            )


def check_layers_alike(layers: Sequence[str], tensors: Iterable[str], kinds: Sequence[object] = ()) -> None:
    """Refuse plain weights where a layer's module lacks the bias that it has in other layers of its kind.

    Args:
        layers: How the names of the layers' tensors begin.
        kinds: Of each layer; empty: all are of one.
    """
    stored = frozenset(tensors)
    found: dict[tuple[object, str], dict[bool, str]] = {}
    for name in sorted(stored, key=natural_order):
        module, _, end = name.rpartition(".")
        index = layer_of(name, layers) if end == "weight" else None
        if index is not None:
            kind = kinds[index] if index < len(kinds) else None
            own_name = module.partition(f".{index}.")[2]
            found.setdefault((kind, own_name), {}).setdefault(f"{module}.bias" in stored, f"{module}.bias")
    for biases in found.values():
        if len(biases) == 2:
            raise StartupError(
                f"weight {biases[False]} does not exist, but {biases[True]} does: the files are damaged or incomplete"
            )
