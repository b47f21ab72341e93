"""Llama 4's text model: chunked layers that rotate, full ones that do not; experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from model_server.errors import StartupError
from model_server.layers.routing import Routing
from model_server.layers.temperature import QueryTemperature
from model_server.models.config import ModelConfig
from model_server.models.decoder.attention.multi_head import Attention, load_attention
from model_server.models.decoder.expert_stores import StackedExperts
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.products import heads_products
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, layer_kinds
from model_server.models.families.moe import indices, top_k
from model_server.weights.products import Products

NAMES = Names(up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj")


@dataclass(frozen=True, slots=True)
class Llama4Attention:
    """Grouped-query attention, an `AttentionSpec`."""

    # On layers that rotate, q and k have mean square 1.
    qk_norm: bool
    # On queries of layers that do not.
    temperature: QueryTemperature | None

    def products(self, spec: Spec) -> Products:
        return heads_products(spec)

    def cached(self, spec: Spec) -> tuple[int, int, int]:
        return spec.num_kv_heads, spec.head_dim, spec.head_dim

    def load(self, loader: Loader, spec: Spec, index: int) -> Attention:
        plain = load_attention(loader, spec, index)
        if spec.ropes[index] is None:
            return replace(plain, temperature=self.temperature)
        if not self.qk_norm:
            return plain
        # Before the rotation, which leaves lengths as they are, instead of after it.
        ones = torch.ones(spec.head_dim, device=loader.device)
        return replace(plain, qk_norm=loader.fused.rms_norm(ones, spec.norm_eps))


def llama4_text(config: ModelConfig) -> Spec:
    """Describe Llama 4: one expert per token, on weighted inputs, beside a shared one."""
    num_layers = config.count("num_hidden_layers")
    rotates = _rotates(config, num_layers)
    kinds = layer_kinds(
        config,
        ["chunked_attention" if on else "full_attention" for on in rotates],
        ("chunked_attention", "full_attention"),
    )
    chunk = config.optional_number("attention_chunk_size", 8192)
    temperature = None
    tuning = config.get("attn_temperature_tuning")  # a number in the first files
    if tuning is None or tuning:
        temperature = QueryTemperature(config.number("attn_scale", 0.1), config.number("floor_scale", 8192))
    qk_norm = config.flag("use_qk_norm", True)
    plain = base(
        config,
        default_kv_heads=8,
        default_head_dim=128,
        default_positions=131072,
        default_eps=1e-5,
        default_theta=500000.0,
        names=NAMES,
        intermediate_size=config.count("intermediate_size_mlp", 16384),
        rope_pairs_adjacent=True,
        chunks=tuple(int(chunk) if kind == "chunked_attention" and chunk else None for kind in kinds),
        attention=Llama4Attention(qk_norm, temperature),
        mlps=_layers(config, num_layers),
    )
    if qk_norm and plain.ropes[0] is not None and plain.ropes[0].kind not in ("default", "linear", "dynamic", "llama3"):
        raise StartupError(f"config.json: rope scaling {plain.ropes[0].kind!r} is not served with `use_qk_norm`")
    return replace(plain, ropes=tuple(rope if on else None for rope, on in zip(plain.ropes, rotates, strict=True)))


def _rotates(config: ModelConfig, num_layers: int) -> list[bool]:
    """Read `no_rope_layers`, 1 where a layer does rotate; by default not every fourth."""
    listed = indices(config, "no_rope_layers")
    if not listed:
        interval = config.count("no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if len(listed) < num_layers:
        raise StartupError(f"config.json: `no_rope_layers` must be a list of {num_layers} numbers")
    return [bool(on) for on in listed[:num_layers]]


def _layers(config: ModelConfig, num_layers: int) -> tuple[Moe | None, ...]:
    num_experts = config.count("num_local_experts", 16)
    size = config.count("intermediate_size")
    mixture = Moe(
        routing=Routing(num_experts=num_experts, top_k=top_k(config, num_experts, 1), score="sigmoid", on_input=True),
        intermediate_size=size,
        router="feed_forward.router",
        store=StackedExperts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", swapped=True),
        shared="feed_forward.shared_expert",
        shared_size=size,
    )
    step = config.count("interleave_moe_layer_step", 1)
    sparse = indices(config, "moe_layers")
    if sparse is None:
        sparse = tuple(range(step - 1, num_layers, step))
    return tuple(mixture if i in sparse else None for i in range(num_layers))
