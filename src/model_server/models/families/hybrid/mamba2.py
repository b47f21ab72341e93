"""Mamba-2 in most layers, attention in others: Granite 4.0 H, Bamba; in each layer beside it: Falcon H1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.expert_stores import SeparateExperts
from model_server.models.decoder.mixers.beside import BesideSpec, ScaledMlpSpec
from model_server.models.decoder.mixers.mamba2 import Mamba2Spec
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base
from model_server.models.families.llama import granite
from model_server.models.families.moe import granitemoe, indices
from model_server.recurrence.mamba2 import NormPlace

# What configs call the kinds of layers, now and at first.
_KINDS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}

_FEED_FORWARD = Names(
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    mlp_norm="pre_ff_layernorm",
    norm="model.final_layernorm",
)


def granitemoehybrid(config: ModelConfig) -> Spec:
    """Describe Granite 4.0: an MLP for every token, perhaps beside experts; most do not rotate."""
    num_layers, size = config.count("num_hidden_layers"), config.count("shared_intermediate_size", 1024)
    config = config.renamed({"layer_types": ("layer_types", "layers_block_type")})
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        name = config.named("layer_types")
        raise StartupError(f"config.json: `{name}` must name {num_layers} times one of {', '.join(_KINDS)}")
    kind = config.get("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        raise StartupError(f"config.json: `position_embedding_type` must be null or 'rope', got {kind!r}")
    plain = granite(config)
    # As GGUF files have them.
    are_separate = config.flag("separate_matrices", False)
    ups = ("gate_proj", "up_proj") if are_separate else ("input_linear",)
    if config.get("num_local_experts") != 0:
        experts = granitemoe(config).mlps[0]
        assert isinstance(experts, Moe)
        mixture = replace(
            experts,
            store=SeparateExperts("block_sparse_moe.experts") if are_separate else experts.store,
            shared="shared_mlp",
            shared_size=size,
            shared_up=ups,
            shared_down="output_linear",
        )
        plain = replace(plain, mlps=(mixture,) * num_layers)
    return replace(
        plain,
        names=Names(up=tuple(f"shared_mlp.{name}" for name in ups), down="shared_mlp.output_linear"),
        intermediate_size=size,
        ropes=plain.ropes if kind == "rope" else (None,) * num_layers,
        mixers=_mixers(config, [_KINDS[kind] for kind in kinds]),
    )


def bamba(config: ModelConfig) -> Spec:
    """Describe Bamba: attention in a few layers, where half of a head rotates."""
    num_layers, attention = config.count("num_hidden_layers"), indices(config, "attn_layer_indices") or ()
    config = config.replaced(partial_rotary_factor=0.5)
    return base(
        config,
        default_kv_heads=8,
        default_eps=1e-5,
        default_positions=262144,
        default_rotary_factor=0.5,
        names=_FEED_FORWARD,
        mixers=_mixers(config, [index not in attention for index in range(num_layers)]),
    )


def falcon_h1(config: ModelConfig) -> Spec:
    """Describe Falcon H1: attention and Mamba-2 beside each other in each layer, and many factors."""
    values = config.count("mamba_d_ssm", 1024)
    if config.has("mamba_d_ssm") and config.get("mamba_d_ssm") is None:
        values = config.count("mamba_expand", 2) * config.count("hidden_size")
    norm: NormPlace | None = None
    if config.flag("mamba_rms_norm", False):
        norm = "before gates" if config.flag("mamba_norm_before_gate", True) else "behind gates"
    gate, down = _factors(config, "mlp_multipliers", 2)
    before_gates, inputs, keys, queries, times = _factors(config, "ssm_multipliers", 5)
    mixer = replace(
        _mixer(config, values),
        norm=norm,
        input_factor=config.number("ssm_in_multiplier", 1.0),
        factors=(before_gates, inputs, keys, queries, times),
    )
    plain = base(
        config,
        default_kv_heads=8,
        default_eps=1e-5,
        default_positions=8192,
        names=_FEED_FORWARD,
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_multiplier=config.number("lm_head_multiplier", 1.0),
    )
    beside = BesideSpec(
        mixer=mixer,
        attention_input=config.number("attention_in_multiplier", 1.0),
        attention_output=config.number("attention_out_multiplier", 1.0),
        mixer_output=config.number("ssm_out_multiplier", 1.0),
    )
    mlp = None if gate == down == 1.0 else ScaledMlpSpec(gate=gate, output=down)
    return replace(
        plain,
        scale=plain.scale * config.number("key_multiplier", 1.0),
        mixers=(beside,) * plain.num_layers,
        mlps=(mlp,) * plain.num_layers,
    )


def _factors(config: ModelConfig, name: str, count: int) -> list[float]:
    value = config.get(name)
    if value is None:
        return [1.0] * count
    found = [_number(one) for one in value] if isinstance(value, list | tuple) else []
    factors = [one for one in found if one is not None]
    if len(factors) != count or len(found) != count:
        raise StartupError(f"config.json: `{name}` must be {count} numbers, got {value!r:.200}")
    return factors


def _mixers(config: ModelConfig, are_mamba: Sequence[bool]) -> tuple[Mamba2Spec | None, ...]:
    """Read the fields of Granite and Bamba."""
    mixer = _mixer(config, config.count("mamba_expand", 2) * config.count("hidden_size"))
    return tuple(mixer if is_mamba else None for is_mamba in are_mamba)


def _mixer(config: ModelConfig, values: int) -> Mamba2Spec:
    """Describe Mamba-2 of so many numbers for each token."""
    heads, groups = config.count("mamba_n_heads", 128), config.count("mamba_n_groups", 1)
    head_dim = values // heads if config.get("mamba_d_head") in (None, "auto") else config.count("mamba_d_head")
    if heads * head_dim != values or heads % groups != 0:
        raise StartupError(
            f"config.json: `mamba_n_heads` ({heads}) of `mamba_d_head` ({head_dim}) must be {values} numbers in all, "
            f"in {groups} equal groups (`mamba_n_groups`)"
        )
    width = config.count("mamba_d_conv", 4)
    if width < 2:
        raise StartupError("config.json: `mamba_d_conv` must be at least 2, got 1")
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        raise StartupError(f"config.json: `hidden_act` is served for {config.model_type} as 'silu' only")
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=config.count("mamba_d_state", 256),
        width=width,
        limits=time_limits(config),
    )


def time_limits(config: ModelConfig) -> tuple[float, float]:
    """Return the bounds of steps in time."""
    value = config.get("time_step_limit")
    if value is None:
        return 0.0, float("inf")
    found = [_number(one) for one in value] if isinstance(value, list | tuple) else []
    least, most = found if len(found) == 2 else (None, None)
    if least is None or most is None or not 0 <= least <= most:
        raise StartupError(
            f"config.json: `{config.named('time_step_limit')}` must be two ascending numbers, got {value!r:.200}"
        )
    return least, most


def _number(value: object) -> float | None:
    """Read a number, as JSON or transformers writes it: JSON has no infinity."""
    if isinstance(value, Mapping):
        value = {"Infinity": float("inf")}.get(str(value.get("__float__")))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
