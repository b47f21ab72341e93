"""Nemotron H: each layer is one of Mamba-2, attention without rotations, an MLP without gate, and such experts."""

from __future__ import annotations

from dataclasses import replace

from model_server.errors import StartupError
from model_server.layers.routing import Routing
from model_server.models.config import ModelConfig
from model_server.models.decoder.expert_stores import SeparateExperts
from model_server.models.decoder.mixers.mamba2 import Mamba2Spec
from model_server.models.decoder.mixers.nothing import Nothing
from model_server.models.decoder.moe import Latent, Moe
from model_server.models.decoder.spec import MixerSpec, MlpSpec, Names, Spec
from model_server.models.families.base import base
from model_server.models.families.hybrid.mamba2 import time_limits
from model_server.models.families.moe import top_k

_NAMES = Names(
    base="backbone.",
    embedding="backbone.embeddings",
    layers="backbone.layers",
    attention_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    mlp_norm=None,
    up=("mixer.up_proj",),
    activation="mixer.act_fn",
    down="mixer.down_proj",
    norm="backbone.norm_f",
)
# By their signs in `hybrid_override_pattern`, and by name, now and at first.
_SIGNS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KINDS = {one: one for one in _SIGNS.values()} | {"mamba": "linear_attention", "attention": "full_attention"}
# What configs of another family call the same.
_RENAMED: dict[str, str | tuple[str, ...]] = {
    "n_groups": ("mamba_n_groups", "n_groups"),
    "conv_kernel": ("mamba_d_conv", "conv_kernel"),
    "time_step_limit": ("mamba_dt_limit", "time_step_limit"),
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "mlp_hidden_act",
}


def nemotron_h(config: ModelConfig) -> Spec:
    """Describe Nemotron H, also with experts."""
    kinds = _kinds(config)
    config = config.renamed(_RENAMED).replaced(num_hidden_layers=len(kinds))
    mixer = _mixer(config)
    nothing = Nothing()
    mixers: dict[str, MixerSpec | None] = {"linear_attention": mixer, "full_attention": None}
    mlps: dict[str, MlpSpec | None] = {"mlp": None}
    if "moe" in kinds:
        mlps["moe"] = _mixture(config)
    return base(
        config,
        default_head_dim=128,
        default_kv_heads=8,
        default_eps=1e-5,
        default_positions=4096,
        default_activation="relu2",
        names=_NAMES,
        left_over=(r"^mtp\.",),  # multi-token prediction
        block="single",
        gated=False,
        ropes=(None,) * len(kinds),
        mixers=tuple(mixers.get(kind, nothing) for kind in kinds),
        mlps=tuple(mlps.get(kind, nothing) for kind in kinds),
    )


def _kinds(config: ModelConfig) -> list[str]:
    """Return what each layer is."""
    value = config.get("layers_block_type")
    if value is None:
        value = config.get("layer_types")
    if value is None:
        pattern = config.get("hybrid_override_pattern")
        value = [_SIGNS.get(sign, sign) for sign in pattern] if isinstance(pattern, str) else pattern
    if value is None:
        value = ["linear_attention", "moe", "full_attention", "mlp"]
    if not isinstance(value, list) or not value or any(kind not in _KINDS for kind in value):
        raise StartupError(
            f"config.json: `layers_block_type` must name each layer, one of {', '.join(_KINDS)}, or "
            f"`hybrid_override_pattern` give signs of them: {' '.join(_SIGNS)}"
        )
    return [_KINDS[kind] for kind in value]


def _mixer(config: ModelConfig) -> Mamba2Spec:
    heads, groups = config.count("mamba_num_heads", 128), config.count("n_groups", 8)
    if heads % groups != 0:
        raise StartupError(
            f"config.json: `mamba_num_heads` ({heads}) is not a multiple of `{config.named('n_groups')}` ({groups})"
        )
    width = config.count("conv_kernel", 4)
    if width < 2:
        raise StartupError(f"config.json: `{config.named('conv_kernel')}` must be at least 2, got 1")
    if config.text("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise StartupError("config.json: `mamba_hidden_act` is served for nemotron_h as 'silu' only")
    return Mamba2Spec(
        heads=heads,
        head_dim=config.count("mamba_head_dim", 64),
        groups=groups,
        state_size=config.count("ssm_state_size", 128),
        width=width,
        limits=time_limits(config),
        prefix="mixer.",
    )


def _mixture(config: ModelConfig) -> Moe:
    num_experts = config.count("n_routed_experts", 8)
    groups = config.count("n_group", 1)
    if num_experts % groups != 0:
        raise StartupError(f"config.json: `n_routed_experts` ({num_experts}) is not a multiple of `n_group` ({groups})")
    routing = Routing(
        num_experts=num_experts,
        top_k=top_k(config, num_experts, 2),
        score="sigmoid",
        num_groups=groups,
        top_groups=config.count("topk_group", 1),
        group_score="best_two",
        norm=1.0 if config.flag("norm_topk_prob", True) else None,
        scaling=config.number("routed_scaling_factor", 1.0),
        wide=True,
    )
    mixture = Moe(
        routing=routing,
        intermediate_size=config.count("moe_intermediate_size", 7688),
        router="mixer.gate",
        store=SeparateExperts("mixer.experts", gate=None, fused="mixer.experts"),
        correction="mixer.gate.e_score_correction_bias",
        shared="mixer.shared_experts",
        shared_size=config.count("moe_shared_expert_intermediate_size", 7688),
        shared_up=("up_proj",),
    )
    if config.get("moe_latent_size") is None:
        return mixture
    latent = Latent(config.count("moe_latent_size"), "mixer.fc1_latent_proj", "mixer.fc2_latent_proj")
    return replace(mixture, latent=latent)
