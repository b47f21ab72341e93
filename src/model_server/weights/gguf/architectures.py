"""The architectures of GGUF files: names of their tensors in transformers' families, and how their numbers differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from model_server.weights.gguf.architecture import NUMBERED, Architecture, experts, mlp, shared_expert
from model_server.weights.gguf.hybrids import HYBRIDS
from model_server.weights.gguf.latent import LATENT

_LAYER_NORM = "attention.layer_norm_epsilon"

_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_MLP = mlp("mlp")
_LAYER = {**_ATTENTION, **_MLP}
_SANDWICH = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BEHIND = {name: module for name, module in _SANDWICH.items() if name not in ("attn_norm", "ffn_norm")}
_PACKED = {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_ROUTED = {**_ATTENTION, "ffn_gate_inp": "mlp.gate"}
_EXPERTS = experts("mlp.experts")
_COUNTS = {
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip

ARCHITECTURES = {
    "llama": Architecture(model_type="llama", layer=_LAYER, adjacent=True),
    "qwen2": Architecture(model_type="qwen2", layer=_LAYER),
    "qwen3": Architecture(model_type="qwen3", layer=_LAYER),
    "gemma": Architecture(model_type="gemma", layer=_LAYER, added=1.0),
    "gemma2": Architecture(model_type="gemma2", layer=_SANDWICH, added=1.0),
    "gemma3": Architecture(model_type="gemma3_text", layer=_SANDWICH, added=1.0),
    "phi3": Architecture(model_type="phi3", layer=_PACKED),
    "smollm3": Architecture(model_type="smollm3", layer=_LAYER, adjacent=True),
    "olmo2": Architecture(model_type="olmo2", layer=_BEHIND, expected={"attention.sliding_window": ()}),
    "granite": Architecture(
        model_type="granite",
        layer=_LAYER,
        adjacent=True,
        fields={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "command-r": Architecture(
        model_type="cohere",
        layer=_LAYER,
        epsilon=("layer_norm_eps", _LAYER_NORM),
        fields={"logit_scale": "logit_scale"},
    ),
    "cohere2": Architecture(
        model_type="cohere2",
        layer=_LAYER,
        epsilon=("layer_norm_eps", _LAYER_NORM),
        fields={"logit_scale": "logit_scale"},
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        layer={**_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=("norm_epsilon", _LAYER_NORM),
        fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    ),
    "stablelm": Architecture(
        model_type="stablelm",
        layer={name: module for name, module in _LAYER.items() if not name.endswith(("q_norm", "k_norm"))},
        epsilon=("layer_norm_eps", _LAYER_NORM),
        fields={"use_parallel_residual": "use_parallel_residual"},
        present={"use_qkv_bias": "blk.0.attn_q.bias"},
    ),
    "glm4": Architecture(
        model_type="glm4",
        layer={
            **_PACKED,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        present={"attention_bias": "blk.0.attn_q.bias"},
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        layer={
            **_ROUTED,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **shared_expert("mlp.shared_expert"),
        },
        experts=_EXPERTS,
        fields={**_COUNTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        fixed={"norm_topk_prob": False, "decoder_sparse_step": 1},
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        layer=_ROUTED,
        experts=_EXPERTS,
        fields=_COUNTS,
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        layer={
            **_ROUTED,
            **_MLP,
            **shared_expert("mlp.shared_experts"),
            "post_attention_norm": "post_attention_layernorm",
        },
        tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        experts=_EXPERTS,
        fields={
            **{name: key for name, key in _COUNTS.items() if name != "num_experts"},
            "n_routed_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        present={"use_qk_norm": "blk.0.attn_q_norm.weight", "attention_bias": "blk.0.attn_q.bias"},
        expected={"expert_gating_func": (2,)},
    ),
    **HYBRIDS,
    **LATENT,
}
_MIXTRAL = Architecture(
    model_type="mixtral",
    layer={**_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts=experts("block_sparse_moe.experts", NUMBERED),
    adjacent=True,
    fields={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
)


def architecture_of(metadata: Mapping[str, Any], path: Path) -> Architecture:
    """Return a served architecture.

    Raises:
        StartupError: The file is of another one, or of a mixture of experts where the dense models are served.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise StartupError(f"{path} lacks the metadata `general.architecture`, a text")
    if name not in ARCHITECTURES:
        raise StartupError(
            f"{path} is of the architecture {name!r:.80}, which is not served from GGUF files; served are "
            f"{', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[name]
    if architecture.may_be_dense or bool(metadata.get(f"{name}.expert_count", 0)) == bool(architecture.experts):
        return architecture
    if name == "llama":
        return _MIXTRAL
    kind = "a mixture of experts" if not architecture.experts else "no mixture of experts"
    raise StartupError(f"{path} is of the architecture {name} and {kind}, which is not served from GGUF files")
