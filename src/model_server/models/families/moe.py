"""Experts instead of the MLP: Mixtral and the like, DBRX, GPT-OSS."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model_server.errors import StartupError
from model_server.layers.routing import Routing
from model_server.models.config import ModelConfig
from model_server.models.decoder.expert_stores import FlatExperts, SeparateExperts, StackedExperts
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, layer_kinds, one_window, windows_of
from model_server.models.families.llama import granite

# Mixtral's names, which Phi 3.5 MoE shares.
ROUTER = "block_sparse_moe.gate"
EXPERTS = SeparateExperts("block_sparse_moe.experts", "w1", "w3", "w2")

DBRX = Names(
    base="transformer.",
    embedding="transformer.wte",
    layers="transformer.blocks",
    attention_norm="norm_attn_norm.norm_1",
    qkv=("norm_attn_norm.attn.Wqkv",),
    output="norm_attn_norm.attn.out_proj",
    mlp_norm="norm_attn_norm.norm_2",
    norm="transformer.norm_f",
)
DBRX_FIELDS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}

# What transformers takes a silent GPT-OSS config to mean.
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def mixtral(config: ModelConfig) -> Spec:
    """Describe Mixtral: the best two of eight experts, weights summing to 1."""
    num_experts = config.count("num_local_experts", 8)
    mixture = Moe(
        routing=Routing(num_experts=num_experts, top_k=top_k(config, num_experts, 2), norm=1.0),
        intermediate_size=config.count("intermediate_size"),
        router=ROUTER,
        router_module="mlp.gate",
        store=EXPERTS,
    )
    return _everywhere(mixture, _mixtral_base(config))


def phimoe(config: ModelConfig) -> Spec:
    """Describe Phi 3.5 MoE: two of sixteen by a sparse mixer, biased LayerNorms, own LongRoPE scales."""
    num_experts = config.count("num_local_experts", 16)
    jitter = 0.0 if config.get("router_jitter_noise") == 0 else config.number("router_jitter_noise", 0.01)
    if top_k(config, num_experts, 2) != 2:
        raise StartupError("config.json: `num_experts_per_tok` must be 2 for phimoe")
    mixture = Moe(
        routing=Routing(num_experts=num_experts, top_k=2, score="sparse_mixer", jitter=jitter),
        intermediate_size=config.count("intermediate_size"),
        router=ROUTER,
        router_module="mlp.router",
        store=EXPERTS,
    )
    return _everywhere(mixture, _mixtral_base(config, norm="layer", head_bias=config.flag("lm_head_bias", False)))


def _mixtral_base(config: ModelConfig, **differences: Any) -> Spec:
    return base(
        config,
        default_kv_heads=8,
        default_positions=131072,
        default_eps=1e-5,
        default_theta=1e6,
        windows=one_window(config, None),
        **differences,
    )


def granitemoe(config: ModelConfig) -> Spec:
    """Describe Granite MoE: stacked experts, weights summing to 1."""
    num_experts = config.count("num_local_experts", 8)
    mixture = Moe(
        routing=Routing(num_experts=num_experts, top_k=top_k(config, num_experts, 2), norm=1.0),
        intermediate_size=config.count("intermediate_size"),
        router="block_sparse_moe.router.layer",
        router_module="block_sparse_moe.router",
        store=StackedExperts(
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
            rows_first=True,
            fused="block_sparse_moe.experts",
        ),
    )
    return _everywhere(mixture, granite(config))


def qwen2_moe(config: ModelConfig) -> Spec:
    """Describe Qwen 1.5 and 2 MoE: many small experts, and a gated shared one."""
    num_layers = config.count("num_hidden_layers")
    windows: tuple[int | None, ...] = (None,) * num_layers
    if config.flag("use_sliding_window", False):
        last = 0 if config.get("max_window_layers") == 0 else config.count("max_window_layers", 28)
        kinds = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(num_layers)]
        windows = windows_of(layer_kinds(config, kinds), config.count("sliding_window", 4096))
    mixture = replace(
        qwen_mixture(config, experts=60, chosen=4, size=1408),
        shared="mlp.shared_expert",
        shared_size=config.count("shared_expert_intermediate_size", 5632),
        shared_gate="mlp.shared_expert_gate",
    )
    plain = base(config, default_kv_heads=16, default_positions=32768, windows=windows)
    return replace(plain, mlps=qwen_layers(config, mixture))


def qwen3_moe(config: ModelConfig) -> Spec:
    """Describe Qwen 3 MoE: norms of q and k, no shared expert, one window or none."""
    windows = one_window(config, 4096) if config.flag("use_sliding_window", False) else None
    plain = base(
        config,
        default_kv_heads=4,
        default_positions=32768,
        windows=windows or (None,) * config.count("num_hidden_layers"),
    )
    config = config.renamed({"num_experts": ("num_experts", "num_local_experts")})
    return replace(plain, mlps=qwen_layers(config, qwen_mixture(config, experts=128, chosen=8, size=768)))


def qwen_mixture(config: ModelConfig, *, experts: int, chosen: int, size: int) -> Moe:
    """Describe the mixture, with defaults for absent fields."""
    num_experts = config.count("num_experts", experts)
    norm = 1.0 if config.flag("norm_topk_prob", False) else None
    return Moe(
        routing=Routing(num_experts=num_experts, top_k=top_k(config, num_experts, chosen), norm=norm),
        intermediate_size=config.count("moe_intermediate_size", size),
        router="mlp.gate",
        store=SeparateExperts(),
    )


def qwen_layers(config: ModelConfig, mixture: Moe) -> tuple[Moe | None, ...]:
    """Give every `decoder_sparse_step`-th layer experts, except `mlp_only_layers`."""
    step = config.count("decoder_sparse_step", 1)
    dense = indices(config, "mlp_only_layers") or ()
    return tuple(
        mixture if (i + 1) % step == 0 and i not in dense else None for i in range(config.count("num_hidden_layers"))
    )


def dbrx(config: ModelConfig) -> Spec:
    """Describe DBRX: flat expert matrices, bounded q, k and v, LayerNorms without bias."""
    config = config.renamed(DBRX_FIELDS)
    attention, ffn = _block(config, "attn_config"), _block(config, "ffn_config")
    num_experts = ffn.count("moe_num_experts", 4)
    act = ffn.get("ffn_act_fn")
    size = ffn.count("ffn_hidden_size", 3584)
    mixture = Moe(
        routing=Routing(
            num_experts=num_experts,
            top_k=top_k(ffn.renamed({"num_experts_per_tok": "moe_top_k"}), num_experts, 1),
            norm=ffn.optional_number("moe_normalize_expert_weights", 1.0),
        ),
        intermediate_size=size,
        router="ffn.router.layer",
        store=FlatExperts("ffn.experts.mlp.w1", "ffn.experts.mlp.v1", "ffn.experts.mlp.w2"),
    )
    plain = base(
        config.replaced(
            num_key_value_heads=attention.count("kv_n_heads", 1),
            hidden_act=act.get("name", "silu") if isinstance(act, dict) else "silu",
            rms_norm_eps=1e-5,
            head_dim=None,
        ),
        default_theta=attention.number("rope_theta", 10000.0),
        names=DBRX,
        norm="layer",
        intermediate_size=size,
        qkv_clip=attention.optional_number("clip_qkv"),
    )
    return _everywhere(mixture, plain)


def gpt_oss(config: ModelConfig) -> Spec:
    """Describe GPT-OSS: sinks, windows on every second layer, biases, a bounded activation."""
    num_layers = config.count("num_hidden_layers")
    num_experts = config.renamed({"num_local_experts": "num_experts"}).count("num_local_experts", 128)
    mixture = Moe(
        routing=Routing(num_experts=num_experts, top_k=top_k(config, num_experts, 4), norm=1.0),
        intermediate_size=config.count("intermediate_size"),
        router="mlp.router",
        store=StackedExperts("mlp.experts.gate_up_proj", "mlp.experts.down_proj", interleaved=True),
        swiglu=(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)),
    )
    if not config.rope_block() and config.get("rope_parameters") is None:  # an empty object says: plain rotations
        config = config.replaced(rope_parameters=GPT_OSS_ROPE)
    kinds = layer_kinds(config, [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)])
    window = one_window(config, 128)[0]
    plain = base(
        config,
        default_kv_heads=8,
        default_head_dim=64,
        default_positions=131072,
        default_eps=1e-5,
        default_theta=150000.0,
        names=Names(sinks="self_attn.sinks"),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
    )
    return _everywhere(mixture, plain)


def _everywhere(mixture: Moe, plain: Spec) -> Spec:
    return replace(plain, mlps=(mixture,) * plain.num_layers)


def _block(config: ModelConfig, name: str) -> ModelConfig:
    """Return a nested config; absent: empty."""
    block = config.get(name)
    if block is None:
        block = {}
    if not isinstance(block, dict):
        raise StartupError(f"config.json: `{name}` must be an object, got {block!r}")
    fields: dict[str, Any] = block
    return ModelConfig(fields)


def top_k(config: ModelConfig, num_experts: int, default: int | None) -> int:
    """Return `num_experts_per_tok`, which there must be experts for."""
    count = config.count("num_experts_per_tok", default)
    if count > num_experts:
        name = config.named("num_experts_per_tok")
        raise StartupError(f"config.json: `{name}` is {count}, but there are {num_experts} experts")
    return count


def indices(config: ModelConfig, name: str) -> tuple[int, ...] | None:
    """Return a list of layer numbers, if any."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise StartupError(f"config.json: `{config.named(name)}` must be a list of layer numbers, got {value!r}")
    return tuple(value)
