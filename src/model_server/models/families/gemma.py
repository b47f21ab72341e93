"""Gemma: scaled embeddings, a tied head; up to Gemma 3 norm weights less one.

Gemma 4 has two sizes of heads, layers that read others' keys, vectors of tokens for each layer, and experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from model_server.errors import StartupError
from model_server.layers.rotary import Rope
from model_server.layers.routing import Routing
from model_server.models.config import ModelConfig
from model_server.models.decoder.expert_stores import StackedExperts
from model_server.models.decoder.experts_beside import ExpertsBeside
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.spec import LayerSizes, Names, Spec
from model_server.models.families.base import BLANK_IDS, UnknownFamilyError, base, layer_kinds, rotary_dim, windows_of
from model_server.models.families.moe import top_k

# Kind of layer -> the field that older files have the base of its rotation in, and what a silent file means.
_THETAS = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}

SANDWICH = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

_GEMMA4 = replace(
    SANDWICH,
    scalar="layer_scalar",
    layer_inputs="model.embed_tokens_per_layer",
    layer_inputs_projection="model.per_layer_model_projection",
    layer_inputs_norm="model.per_layer_projection_norm",
)
_FULL = "full_attention"
_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_SIZES = ("head_dim", "num_key_value_heads")
"""What `per_layer_config` may say of a layer."""


def gemma(config: ModelConfig) -> Spec:
    """Describe Gemma, whose early files say `gelu` for the approximation."""
    config = config.without("hidden_activation").renamed({"hidden_activation": "hidden_act"})
    is_old = config.get("hidden_act") == "gelu"
    return _gemma(config.replaced(hidden_activation="gelu_pytorch_tanh") if is_old else config)


def gemma2(config: ModelConfig) -> Spec:
    """Describe Gemma 2: norms before and after, caps, a window on every second layer."""
    kinds = [("full_attention", "sliding_attention")[(i + 1) % 2] for i in range(config.count("num_hidden_layers"))]
    return _gemma(
        config,
        default_kv_heads=4,
        names=SANDWICH,
        windows=_windows(config, layer_kinds(config, kinds)),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=config.optional_number("attn_logit_softcapping", 50.0),
        logits_softcap=config.optional_number("final_logit_softcapping", 30.0),
    )


def gemma3_text(config: ModelConfig) -> Spec:
    """Describe Gemma 3: windows on five of six layers, which rotate by own parameters; norms of q and k."""
    num_layers = config.count("num_hidden_layers")
    pattern = config.count("sliding_window_pattern", 6)
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    kinds = layer_kinds(config, default)
    head_dim = config.count("head_dim", 256)
    positions = config.count("max_position_embeddings", 131072)
    ropes = {kind: config.rope(head_dim, positions, block=block) for kind, block in _rope_blocks(config, kinds).items()}
    return _gemma(
        config,
        default_kv_heads=4,
        default_positions=131072,
        names=SANDWICH,
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=_windows(config, kinds),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        logits_softcap=config.optional_number("final_logit_softcapping"),
    )


def _rope_blocks(config: ModelConfig, kinds: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return rotary parameters by kind of layer; older files' `rope_scaling` is for full layers."""
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or not isinstance(scaling, Mapping):
        raise StartupError("config.json: `rope_parameters` and `rope_scaling` must be objects")
    if strange := sorted(set(given) - set(_THETAS)):
        raise StartupError(
            f"config.json: `rope_parameters` must have an object for each of {', '.join(_THETAS)}, got {strange[0]!r}"
        )
    found: dict[str, Mapping[str, Any]] = {}
    for kind in dict.fromkeys(kinds):
        field, theta = _THETAS[kind]
        own = given.get(kind) or {}
        if not isinstance(own, Mapping):
            raise StartupError(f"config.json: `rope_parameters` of {kind} must be an object, got {own!r:.200}")
        added = scaling if kind == "full_attention" else {}
        # As in transformers, where a `type` that is added does not change the `rope_type` that is there.
        found[kind] = {"rope_type": "default", "rope_theta": config.number(field, theta), **own, **added}
        rotary_dim(config.without("partial_rotary_factor"), config.count("head_dim", 256), block=found[kind])
    return found


def _windows(config: ModelConfig, kinds: list[str]) -> tuple[int | None, ...]:
    return windows_of(kinds, config.count("sliding_window", 4096))


def _gemma(config: ModelConfig, *, default_positions: int = 8192, **differences: Any) -> Spec:
    return base(
        config.without("hidden_act").renamed({"hidden_act": "hidden_activation"}),
        default_head_dim=256,
        default_positions=default_positions,
        default_activation="gelu_pytorch_tanh",
        tied=True,
        norm_offset=1.0,
        embedding_multiplier=math.sqrt(config.count("hidden_size")),
        **differences,
    )


def gemma4_text(config: ModelConfig) -> Spec:
    """Describe Gemma 4."""
    plain = _gemma4(config, window=512, positions=131072)
    width = config.get("hidden_size_per_layer_input")
    if width != 0:
        width = config.count("hidden_size_per_layer_input", 256)
        vocab_size = config.count("vocab_size_per_layer_input", 262144)
        if vocab_size < plain.vocab_size:
            raise StartupError(
                f"config.json: `vocab_size_per_layer_input` ({vocab_size}) must be at least `vocab_size` "
                f"({plain.vocab_size})"
            )
        plain = replace(plain, layer_input_width=width, layer_input_vocab_size=vocab_size)
    if not config.flag("enable_moe_block", False):
        return plain
    beside = _experts(config)
    return replace(plain, mlps=(beside,) * plain.num_layers, names=replace(plain.names, mlp_norm=None))


def gemma4_unified_text(config: ModelConfig) -> Spec:
    """Describe Gemma 4 Unified, which has neither experts nor vectors of tokens for each layer."""
    return _gemma4(config, window=1024, positions=262144)


def _gemma4(config: ModelConfig, *, window: int, positions: int) -> Spec:
    num_layers = config.count("num_hidden_layers")
    default = ["sliding_attention" if (i + 1) % 6 else _FULL for i in range(num_layers)]
    kinds = [*layer_kinds(config, default)[:-1], _FULL]  # the last one is, whatever the config says
    config = config.without("hidden_act", "rope_theta").renamed({"hidden_act": "hidden_activation"})
    config = config.renamed({}, head_dim=256, num_key_value_heads=4)
    positions = config.count("max_position_embeddings", positions)
    owners = _owners(config, kinds)
    sizes = _sizes(config, kinds, owners)
    ropes = {kind: _rope(config, kind, sizes[kinds.index(kind)].head_dim, positions) for kind in dict.fromkeys(kinds)}
    readers = "|".join(str(index) for index, owner in enumerate(owners) if owner is not None)
    return base(
        config,
        default_positions=positions,
        default_activation="gelu_pytorch_tanh",
        tied=True,
        names=_GEMMA4,
        embedding_multiplier=math.sqrt(config.count("hidden_size")),
        blank_ids=config.get(BLANK_IDS) or (),
        blank_id=config.get("pad_token_id") or 0,
        scale=1.0,
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=windows_of(kinds, config.count("sliding_window", window)),
        logits_softcap=config.optional_number("final_logit_softcapping"),
        sizes=sizes,
        kv_from=owners,
        value_norm=True,
        left_over=(rf"\.({readers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",) if readers else (),
    )


def _owners(config: ModelConfig, kinds: list[str]) -> tuple[int | None, ...]:
    """Return the last of a layer's kind before those that have no keys, for each of these."""
    shared = config.get("num_kv_shared_layers")
    if shared in (None, 0):
        return ()
    first = len(kinds) - config.count("num_kv_shared_layers")
    if not set(kinds) <= set(kinds[: max(first, 0)]):
        raise StartupError(
            f"config.json: `num_kv_shared_layers` ({shared}) leaves no layer of some kind of `layer_types` that has "
            "keys of its own"
        )
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    return tuple(None if index < first else last[kind] for index, kind in enumerate(kinds))


def _sizes(config: ModelConfig, kinds: list[str], owners: tuple[int | None, ...]) -> tuple[LayerSizes, ...]:
    """Read the layers' sizes, which transformers writes as `per_layer_config`."""
    values_of_keys = config.flag("attention_k_eq_v", False)
    written = config.get("per_layer_config")
    if written is None:
        full: dict[str, Any] = {"head_dim": config.count("global_head_dim", 512)}
        if values_of_keys and config.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = config.get("num_global_key_value_heads")
        written = {index: full for index, kind in enumerate(kinds) if kind == _FULL}
    if not isinstance(written, Mapping) or not all(isinstance(own, Mapping) for own in written.values()):
        raise StartupError("config.json: `per_layer_config` must have an object for each layer that it names")
    written = {int(index): own for index, own in written.items() if str(index).isdecimal()}  # it writes 05, too
    if strange := sorted({name for own in written.values() for name in own} - set(_SIZES)):
        raise UnknownFamilyError(f"config.json: `per_layer_config` is served natively without `{strange[0]}`")
    size = config.count("intermediate_size")
    wide = config.flag("use_double_wide_mlp", False)
    found = []
    for index, kind in enumerate(kinds):
        own = config.replaced(**written.get(index, {}))
        num_kv_heads, head_dim = own.count("num_key_value_heads"), own.count("head_dim")
        if config.count("num_attention_heads") % num_kv_heads != 0:
            raise StartupError(
                f"config.json: `num_attention_heads` is not a multiple of the key heads of layer {index} "
                f"({num_kv_heads})"
            )
        factor = 2 if wide and owners and owners[index] is not None else 1
        found.append(LayerSizes(num_kv_heads, head_dim, factor * size, values_of_keys and kind == _FULL))
    heads = {(kind, one.num_kv_heads, one.head_dim) for kind, one in zip(kinds, found, strict=True)}
    if len(heads) > len(set(kinds)):
        raise UnknownFamilyError("config.json: `per_layer_config` is served natively with one size for each kind")
    return tuple(found)


def _rope(config: ModelConfig, kind: str, head_dim: int, positions: int) -> Rope:
    blocks = config.rope_block() or _ROPES
    block = blocks.get(kind)
    if not isinstance(block, Mapping):
        raise StartupError(f"config.json: `rope_parameters` must have an object for {kind}")
    if block.get("rope_type", "default") == "default":
        block = {name: value for name, value in block.items() if name != "partial_rotary_factor"}
    elif block["rope_type"] != "proportional":
        rotary_dim(config.without("partial_rotary_factor"), head_dim, block=block)
    return config.rope(head_dim, positions, block=block)


def _experts(config: ModelConfig) -> ExpertsBeside:
    num_experts = config.count("num_experts")
    chosen = config.renamed({"num_experts_per_tok": "top_k_experts"})
    return ExpertsBeside(
        experts=Moe(
            routing=Routing(num_experts=num_experts, top_k=top_k(chosen, num_experts, None), norm=1.0),
            intermediate_size=config.count("moe_intermediate_size"),
            router="router.proj",
            store=StackedExperts("experts.gate_up_proj", "experts.down_proj", rows_first=True),
        ),
        norm="pre_feedforward_layernorm",
        post_norm="post_feedforward_layernorm_1",
        experts_norm="pre_feedforward_layernorm_2",
        experts_post_norm="post_feedforward_layernorm_2",
        router_scale="router.scale",
        expert_scale="router.per_expert_scale",
    )
