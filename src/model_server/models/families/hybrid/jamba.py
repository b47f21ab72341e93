"""Jamba: Mamba-1 in most layers, attention without rotations in others, experts in every second one."""

from __future__ import annotations

from model_server.errors import StartupError
from model_server.layers.routing import Routing
from model_server.models.config import ModelConfig
from model_server.models.decoder.expert_stores import SeparateExperts
from model_server.models.decoder.mixers.mamba1 import Mamba1Spec
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base
from model_server.models.families.moe import top_k

_NAMES = Names(
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    mlp_norm="pre_ff_layernorm",
    norm="model.final_layernorm",
)


def jamba(config: ModelConfig) -> Spec:
    """Describe Jamba: a layer in `attn_layer_period` has attention, one in `expert_layer_period` experts."""
    num_layers = config.count("num_hidden_layers")
    attends = _every(config, "attn_layer", num_layers, 8, 4)
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        raise StartupError("config.json: `hidden_act` is served for jamba as 'silu' only")
    mixer = _mixer(config)
    config = config.renamed({"num_experts": ("num_local_experts", "num_experts")})
    num_experts = config.count("num_experts", 16)
    mixture = _mixture(config, num_experts) if num_experts > 1 else None
    has_experts = _every(config, "expert_layer", num_layers, 2, 1)
    return base(
        config,
        default_kv_heads=8,
        default_positions=262144,
        names=_NAMES,
        ropes=(None,) * num_layers,
        mixers=tuple(None if one else mixer for one in attends),
        mlps=tuple(mixture if one else None for one in has_experts),
    )


def _every(config: ModelConfig, kind: str, num_layers: int, default_period: int, default_offset: int) -> list[bool]:
    """Return which layers are of the kind: one in each period."""
    period, name = config.count(f"{kind}_period", default_period), f"{kind}_offset"
    offset = 0 if config.get(name) == 0 else config.count(name, default_offset)
    if offset >= period:
        raise StartupError(f"config.json: `{name}` ({offset}) must be below `{kind}_period` ({period})")
    return [index % period == offset for index in range(num_layers)]


def _mixer(config: ModelConfig) -> Mamba1Spec:
    size, width = config.count("hidden_size"), config.count("mamba_d_conv", 4)
    if width < 2:
        raise StartupError("config.json: `mamba_d_conv` must be at least 2, got 1")
    is_auto = config.get("mamba_dt_rank") in (None, "auto")
    return Mamba1Spec(
        channels=config.count("mamba_expand", 2) * size,
        state_size=config.count("mamba_d_state", 16),
        rank=-(-size // 16) if is_auto else config.count("mamba_dt_rank"),
        width=width,
        norms="stored",
        norm_eps=config.number("rms_norm_eps", 1e-6),
    )


def _mixture(config: ModelConfig, num_experts: int) -> Moe:
    return Moe(
        routing=Routing(num_experts=num_experts, top_k=top_k(config, num_experts, 2)),
        intermediate_size=config.count("intermediate_size"),
        router="feed_forward.router",
        store=SeparateExperts("feed_forward.experts", fused="feed_forward.experts"),
    )
