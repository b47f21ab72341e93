"""Which fields of a config.json transformers' modelling of a type reads, found in its source, and other values for
them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Where modelling keeps the config.
_HOLDERS = ("config", "cfg", "text_config")

# What modelling reads for training, for other heads, or for how it computes instead of what.
OF_NO_EFFECT = frozenset({
    "_attn_implementation", "attention_dropout", "attention_softmax_in_fp32", "attn_pdrop", "classifier_dropout",
    "dropout", "dtype", "embd_pdrop", "emb_pdrop", "embedding_dropout", "get_text_config", "hidden_dropout",
    "initializer_range", "input_jitter_noise", "is_sliding", "layerdrop", "moe_jitter_eps", "num_labels",
    "output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type",
    "reorder_and_upcast_attn", "resid_pdrop", "residual_dropout", "return_dict", "router_aux_loss_coef",
    "scale_attention_softmax_in_fp32", "slow_but_exact", "summary_activation", "summary_first_dropout",
    "summary_last_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "use_bettertransformer",
    "use_cache",
})  # fmt: skip
# Of the vision models in the same files.
OF_IMAGES = frozenset({
    "image_size", "image_token_id", "mm_tokens_per_image", "num_channels", "patch_size", "pixel_shuffle_ratio",
    "projector_dropout", "projector_input_dim", "projector_output_dim", "text_config", "vision_config",
})  # fmt: skip

# Of every config: what says nothing of tokens, or only how they are written.
OF_EVERY_TYPE = frozenset({
    "bos_token_id", "chunk_size_feed_forward", "eos_token_id", "init_device", "init_std", "is_decoder",
    "is_encoder_decoder", "mamba_ssm_cache_dtype", "model_max_length", "model_type", "moe_shared_expert_overlap",
    "mtp_layers_block_type", "num_nextn_predict_layers", "residual_in_fp32", "router_jitter_noise",
    "time_step_init_scheme",
})  # fmt: skip

# Fields that the modelling reads through rope utilities, base classes or the config's own class.
_ELSEWHERE = (
    "is_causal", "max_window_layers", "no_rope_layer_interval", "partial_rotary_factor", "rope_scaling", "rope_theta",
    "rotary_pct", "rotary_emb_base", "rope_local_base_freq", "sliding_window_pattern", "tie_word_embeddings",
    "use_sliding_window", "interleave_moe_layer_step", "attention_chunk_size", "original_max_position_embeddings",
    "rms_norm_eps", "layer_norm_eps", "hidden_act", "attn_logit_softcapping", "use_bidirectional_attention",
    "query_pre_attn_scalar", "logit_scale", "head_dim", "num_key_value_heads",
)  # fmt: skip


class _Reads(ast.NodeVisitor):
    """Collects `config.NAME`, `self.config.NAME` and `getattr(config, "NAME", …)`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _is_config(node.value):
            self.names.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        gets = isinstance(node.func, ast.Name) and node.func.id == "getattr"
        if gets and _is_config(node.args[0]) and isinstance(node.args[1], ast.Constant):
            self.names.add(str(node.args[1].value))
        self.generic_visit(node)


def _is_config(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
    return name in _HOLDERS


@cache
def read_by_modelling(model_type: str) -> frozenset[str]:
    """The fields that transformers' modelling of a type reads, without those of no effect on tokens."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    visitor = _Reads()
    for path in folder.glob("modeling_*.py"):
        visitor.visit(ast.parse(path.read_text()))
    return frozenset(visitor.names) - OF_NO_EFFECT - OF_IMAGES


def changes(model_type: str, base: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each field with one or two other values, of a vision model those of its text model. base: the config as it is."""
    text = base.get("text_config")
    if text is not None:
        own = read_by_modelling(model_type)
        for name, value in _changes_of(own | _read_by_text(text["model_type"]), text):
            yield f"text_config.{name}", value
        yield from _changes_of(frozenset({"tie_word_embeddings", "logit_scale"}), base)
        return
    yield from _changes_of(read_by_modelling(model_type), base)


def _read_by_text(model_type: str) -> frozenset[str]:
    """Also of text models whose modelling is a part of the vision model's."""
    try:
        return read_by_modelling(model_type)
    except FileNotFoundError:
        return frozenset()


def _changes_of(read: frozenset[str], base: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    # Beside what modelling reads by this name: what the config's own class makes something else of.
    own = base.keys() - OF_NO_EFFECT - OF_IMAGES - OF_EVERY_TYPE
    names = read | set(_ELSEWHERE) | own if len(read) > 2 else read
    for name in sorted(names):
        if name == "rope_parameters":
            for block in _ROPES:
                yield name, block
            continue
        for value in _others(name, base):
            yield name, value
        if name in _PARTS and isinstance(base.get(name), dict):
            for inner in sorted(base[name].keys() - OF_NO_EFFECT - OF_EVERY_TYPE):
                for value in _others(inner, base[name]):
                    yield f"{name}.{inner}", value


# Objects of the older files of two types.
_PARTS = ("attn_config", "ffn_config")
_FACTORS = [1.0, 1.2, 1.4, 1.7, 2.0, 2.1, 2.5, 3.0]
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False,
    },
    {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": _FACTORS, "long_factor": _FACTORS[::-1],
    },
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
)  # fmt: skip

# Values that need others beside them, or that nothing sensible follows from.
_SPECIAL: dict[str, tuple[Any, ...]] = {
    "activation_function": ("relu", "gelu"),
    "activation": ("relu", "gelu_new"),
    "attn_layer_indices": ([0, 2],),
    "attn_type": ("multiquery_attention",),
    "attn_logit_softcapping": (3.0, None),
    "final_logit_softcapping": (3.0, None),
    "full_attn_idxs": ([0, 2],),
    "head_dim": (8, 32),
    "hidden_act": ("gelu", "relu"),
    "hidden_activation": ("gelu", "silu"),
    "hidden_size": (),
    "indexer_types": (["full", "shared", "full", "shared"],),
    "is_causal": (False,),
    "logit_scale": (0.5,),
    "mamba_hidden_act": ("gelu",),
    "mlp_hidden_act": ("silu",),
    "mlp_only_layers": ([0], [2, 3]),
    "moe_latent_size": (32,),
    "moe_layers": ([0],),
    "max_position_embeddings": (16,),
    "n_embd": (),
    "n_inner": (96,),
    "num_ln_in_parallel_attn": (1, 2),
    "num_hidden_layers": (2,),
    "original_max_position_embeddings": (16,),
    "pad_token_id": (3,),
    "partial_rotary_factor": (0.5,),
    "per_layer_config": ({},),
    "position_embedding_type": ("rope", "nope"),
    "q_lora_rank": (24, None),
    "query_pre_attn_scalar": (64,),
    "rope_local_base_freq": (500.0,),
    "rope_scaling": (
        {"type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
        {"rope_type": "dynamic", "factor": 4.0},
    ),
    "rope_theta": (500.0,),
    "rotary_dim": (8,),
    "rotary_emb_base": (500.0,),
    "rotary_pct": (0.5,),
    "sliding_window": (8, 12, None),
    "sliding_window_pattern": (2,),
    "attention_chunk_size": (8,),
    "softmax_scale": (0.5,),
    "time_step_limit": ([0.05, 0.5],),
    "topk_method": ("greedy", "group_limited_greedy"),
    "use_bidirectional_attention": (True,),
    "vocab_size": (500,),
}  # fmt: skip


def _others(name: str, base: dict[str, Any]) -> tuple[Any, ...]:
    if name in _SPECIAL:
        return tuple(value for value in _SPECIAL[name] if name not in base or base[name] != value)
    value = base.get(name)
    if name.endswith(("_eps", "epsilon")):
        return (1e-2,)
    if isinstance(value, bool) or (value is None and name.startswith(("use_", "qk_"))):
        return (not value,)
    if isinstance(value, int):
        return (value * 2, max(value // 2, 1)) if value > 1 else (value + 1,)
    if isinstance(value, float):
        return (value * 2 or 0.5,)
    if isinstance(value, list) and value != value[::-1]:  # a kind for each layer, or factors
        return (value[::-1],)
    return ()
