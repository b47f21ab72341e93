"""Decoders of LayerNorms and plain MLPs: GPT-2, OPT, Phi, StarCoder 2; StableLM, gated."""

from __future__ import annotations

from dataclasses import replace

from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, one_window

# Masks of causal attention, which older files hold.
MASKS = (r"\.(attn|attention)\.(bias|masked_bias)$",)

# GPT-2's words for what others call otherwise.
GPT2_FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
# Fields of other types, which these do not have.
OF_OTHERS = ("intermediate_size", "hidden_act", "rms_norm_eps")
# Of other types' rotations; GPT-J's has no parameters.
ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
GPT2 = Names(
    base="transformer.",
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    norm="transformer.ln_f",
)


def gpt2(config: ModelConfig) -> Spec:
    """Describe GPT-2: learned positions, [in, out]; SantaCoder's first form has one key head."""
    santacoder = config.get("attention_head_type") == "multiquery"
    names = replace(GPT2, qkv=("attn.q_attn", "attn.kv_attn")) if santacoder else GPT2
    plain = _gpt2(config, names, num_kv_heads=1 if santacoder else None)
    return replace(
        plain,
        transposed=True,
        scale_by_inverse_layer=config.flag("scale_attn_by_inverse_layer_idx", False),
    )


def gpt_bigcode(config: ModelConfig) -> Spec:
    """Describe StarCoder, SantaCoder: one key head; else q, k and v packed by head."""
    multi_query = config.flag("multi_query", True)
    plain = _gpt2(config, GPT2, num_kv_heads=1 if multi_query else None, activation="gelu_pytorch_tanh")
    return replace(plain, packing="stacked" if multi_query else "grouped")


def _gpt2(config: ModelConfig, names: Names, num_kv_heads: int | None, activation: str = "gelu_new") -> Spec:
    config = config.without(*OF_OTHERS).renamed(GPT2_FIELDS)
    plain = base(
        config.renamed({}, intermediate_size=4 * config.count("hidden_size")).replaced(
            num_key_value_heads=num_kv_heads
        ),
        default_eps=1e-5,
        default_positions=1024,
        default_activation=activation,
        tied=True,
        names=names,
        norm="layer",
        gated=False,
        ropes=(None,) * config.count("num_hidden_layers"),
        left_over=MASKS,
    )
    return plain if config.flag("scale_attn_weights", True) else replace(plain, scale=1.0)


def gptj(config: ModelConfig) -> Spec:
    """Describe GPT-J: parallel attention and MLP, partly rotated adjacent pairs, a biased head."""
    config = config.without(*OF_OTHERS, *ROTATION).renamed(GPT2_FIELDS)
    head_dim = config.count("hidden_size") // config.count("num_attention_heads")
    rotary_dim = (
        config.count("rotary_dim", 64) if config.get("rotary_dim") or not config.has("rotary_dim") else head_dim
    )
    names = Names(
        base="transformer.",
        embedding="transformer.wte",
        layers="transformer.h",
        attention_norm="ln_1",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        mlp_norm=None,
        up=("mlp.fc_in",),
        down="mlp.fc_out",
        norm="transformer.ln_f",
    )
    return base(
        config.renamed({}, intermediate_size=4 * config.count("hidden_size")),
        default_eps=1e-5,
        default_positions=2048,
        default_activation="gelu_new",
        names=names,
        head_bias=True,
        block="parallel",
        norm="layer",
        gated=False,
        ropes=(config.rope(rotary_dim, config.count("max_position_embeddings", 2048)),)
        * config.count("num_hidden_layers"),
        rope_pairs_adjacent=True,
        left_over=MASKS,
    )


def gpt_neox(config: ModelConfig) -> Spec:
    """Describe GPT-NeoX, Pythia: q, k, v packed by head, parallel or not."""
    config = config.without("rms_norm_eps", "partial_rotary_factor", "rope_theta").renamed(
        {"rms_norm_eps": "layer_norm_eps", "partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
    )
    names = Names(
        base="gpt_neox.",
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        qkv=("attention.query_key_value",),
        output="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
    )
    return base(
        config,
        default_eps=1e-5,
        default_positions=2048,
        default_activation="gelu",
        default_rotary_factor=0.25,
        names=names,
        block="parallel" if config.flag("use_parallel_residual", True) else "sequential",
        norm="layer",
        gated=False,
        packing="grouped",
        left_over=MASKS,
    )


def opt(config: ModelConfig) -> Spec:
    """Describe OPT, Galactica: positions from the third row on; 350m has norms after sums, narrower embeddings."""
    norm_first = config.flag("do_layer_norm_before", True)
    final = norm_first and not config.flag("_remove_final_layer_norm", False)
    names = Names(
        embedding="model.decoder.embed_tokens",
        embedding_projection="model.decoder.project_in",
        positions="model.decoder.embed_positions",
        layers="model.decoder.layers",
        attention_norm="self_attn_layer_norm",
        output="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
        norm="model.decoder.final_layer_norm" if final else None,
        output_projection="model.decoder.project_out",
    )
    return base(
        config.without(*OF_OTHERS).renamed({"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}),
        default_eps=1e-5,
        default_positions=2048,
        default_activation="relu",
        tied=True,
        names=names,
        block="sequential" if norm_first else "post",
        norm="layer",
        norm_affine=config.flag("layer_norm_elementwise_affine", True),
        gated=False,
        ropes=(None,) * config.count("num_hidden_layers"),
        position_offset=2,
        left_over=(r"decoder\.version$",),
        embedding_size=config.count("word_embed_proj_dim", config.count("hidden_size")),
    )


def phi(config: ModelConfig) -> Spec:
    """Describe Phi 1 and 2: parallel, half of each head rotates, a biased head."""
    names = Names(
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        output="self_attn.dense",
        mlp_norm=None,
        up=("mlp.fc1",),
        activation="mlp.activation_fn",
        down="mlp.fc2",
        norm="model.final_layernorm",
    )
    return base(
        config.without("rms_norm_eps").renamed({"rms_norm_eps": "layer_norm_eps"}),
        default_eps=1e-5,
        default_positions=2048,
        default_activation="gelu_new",
        default_rotary_factor=0.5,
        names=names,
        head_bias=True,
        block="parallel",
        norm="layer",
        gated=False,
    )


def starcoder2(config: ModelConfig) -> Spec:
    """Describe StarCoder 2: grouped heads, rotation, biases, one window."""
    return base(
        config.without("rms_norm_eps").renamed({"rms_norm_eps": "norm_epsilon"}),
        default_kv_heads=2,
        default_eps=1e-5,
        default_positions=4096,
        default_activation="gelu_pytorch_tanh",
        tied=True,
        names=Names(up=("mlp.c_fc",), down="mlp.c_proj"),
        norm="layer",
        gated=False,
        windows=one_window(config, None),
    )


def stablelm(config: ModelConfig) -> Spec:
    """Describe StableLM: Llama with LayerNorms, a quarter rotates; some are parallel, or norm heads."""
    parallel = config.flag("use_parallel_residual", False)
    return base(
        config.without("rms_norm_eps").renamed({"rms_norm_eps": "layer_norm_eps"}),
        default_eps=1e-5,
        default_positions=4096,
        default_rotary_factor=0.25,
        names=Names(
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            mlp_norm=None if parallel else "post_attention_layernorm",
        ),
        block="parallel" if parallel else "sequential",
        norm="layer",
    )
