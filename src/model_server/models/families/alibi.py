"""Decoders biased by distance: BLOOM, MPT, and Falcon, most of which rotates."""

from __future__ import annotations

import math
from typing import Any

from model_server.errors import StartupError
from model_server.layers.alibi import bloom_slopes, mpt_slopes
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base

BLOOM = Names(
    base="transformer.",
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    layers="transformer.h",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    activation="mlp.gelu_impl",
    down="mlp.dense_4h_to_h",
    norm="transformer.ln_f",
)


def bloom(config: ModelConfig) -> Spec:
    """Describe BLOOM: a norm on the embeddings; q, k and v packed by head."""
    if config.flag("apply_residual_connection_post_layernorm", False):
        raise StartupError("config.json: `apply_residual_connection_post_layernorm` is not served")
    config = config.without("rms_norm_eps").renamed(
        {
            "hidden_size": ("hidden_size", "n_embed"),
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "rms_norm_eps": "layer_norm_epsilon",
        }
    )
    return base(
        config,
        default_eps=1e-5,
        tied=True,
        intermediate_size=4 * config.count("hidden_size"),
        activation="gelu_pytorch_tanh",
        names=BLOOM,
        norm="layer",
        gated=False,
        packing="grouped",
        alibi=bloom_slopes(config.count("num_attention_heads")),
        ropes=(None,) * config.count("num_hidden_layers"),
        max_positions=None,
    )


def falcon(config: ModelConfig) -> Spec:
    """Describe Falcon, also as RefinedWeb (40B) and RefinedWebModel (7B, RW)."""
    # The newer architecture packs q, k and v by groups, with attention and MLP in parallel after one or two norms; the
    # older has one key head, or packs by head. RW's ALiBi is added before scores are scaled and rounded to bfloat16.
    new = config.flag("new_decoder_architecture", config.model_type == "RefinedWeb")
    config = config.without("rms_norm_eps").renamed(
        {
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_kv_heads": ("num_kv_heads", "n_head_kv"),
            "rms_norm_eps": "layer_norm_epsilon",
        }
    )
    num_heads, num_layers = config.count("num_attention_heads"), config.count("num_hidden_layers")
    hidden_size = config.count("hidden_size")
    parallel = new or config.flag("parallel_attn", True)
    num_norms = config.count("num_ln_in_parallel_attn", 2 if new else 1)
    one_key_head = not new and config.flag("multi_query", True)
    differences: dict[str, Any] = {}
    if config.flag("alibi", False):
        differences["ropes"] = (None,) * num_layers
        differences["alibi"] = bloom_slopes(num_heads)
        differences["alibi_bfloat16_scale"] = 1 / math.sqrt(hidden_size // num_heads)
    return base(
        config.replaced(num_key_value_heads=1 if one_key_head else config.get("num_kv_heads")),
        default_eps=1e-5,
        tied=True,
        intermediate_size=config.count("ffn_hidden_size", 4 * hidden_size),
        activation=config.text("activation", "gelu"),
        names=_falcon_names(parallel, two_norms=new and num_norms == 2),
        block="parallel" if parallel else "sequential",
        norm="layer",
        gated=False,
        packing="grouped",
        **differences,
    )


def _falcon_names(parallel: bool, *, two_norms: bool) -> Names:
    mlp_norm = "post_attention_layernorm" if not parallel else None
    return Names(
        base="transformer.",
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        attention_norm="ln_attn" if two_norms else "input_layernorm",
        qkv=BLOOM.qkv,
        output=BLOOM.output,
        mlp_norm="ln_mlp" if two_norms else mlp_norm,
        up=BLOOM.up,
        down=BLOOM.down,
        norm="transformer.ln_f",
    )


def mpt(config: ModelConfig) -> Spec:
    """Describe MPT, whose `alibi_bias_max`, `alibi` and `logit_scale` count as in its own code, not in
    transformers'.
    """
    block = config.get("attn_config")
    attention = ModelConfig(block if isinstance(block, dict) else {})
    for name in ("qk_ln", "prefix_lm"):
        if attention.flag(name, False):
            raise StartupError(f"config.json: `{name}` is not served")
    config = (
        config.without("rms_norm_eps")
        .renamed(
            {
                "hidden_size": "d_model",
                "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads",
                "max_position_embeddings": "max_seq_len",
                "rms_norm_eps": "layer_norm_epsilon",
            }
        )
        .replaced(
            num_key_value_heads=1
            if attention.get("attn_type") == "multiquery_attention"
            else attention.get("kv_n_heads")
        )
    )
    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    alibi = attention.flag("alibi", True)
    logit_scale = config.get("logit_scale")
    if logit_scale == "inv_sqrt_d_model":
        logit_scale = 1 / math.sqrt(hidden_size)
    names = Names(
        base="transformer.",
        embedding="transformer.wte",
        positions="transformer.wpe" if not alibi and config.flag("learned_pos_emb", True) else None,
        layers="transformer.blocks",
        attention_norm="norm_1",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        mlp_norm="norm_2",
        up=("ffn.up_proj",),
        activation="ffn.act",
        down="ffn.down_proj",
        norm="transformer.norm_f",
    )
    head_dim = hidden_size // num_heads
    return base(
        config,
        default_eps=1e-5,
        tied=True,
        intermediate_size=config.count("expansion_ratio", 4) * hidden_size,
        activation="gelu",
        names=names,
        norm="layer",
        gated=False,
        qkv_clip=attention.optional_number("clip_qkv"),
        scale=attention.number("softmax_scale", 1 / math.sqrt(head_dim)),
        alibi=mpt_slopes(num_heads, attention.number("alibi_bias_max", 8)) if alibi else None,
        ropes=(None,) * config.count("num_hidden_layers"),
        logits_multiplier=ModelConfig({"logit_scale": logit_scale}).number("logit_scale", 1.0),
    )
