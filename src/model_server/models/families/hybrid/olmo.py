"""OLMo Hybrid: gated delta nets in three of four layers, attention of OLMo 2 in the fourth."""

from __future__ import annotations

from dataclasses import replace

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.mixers.gated_delta import GatedDeltaSpec
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, layer_kinds

_KINDS = ("linear_attention", "full_attention")
_SPELLINGS = (
    (".input_layernorm.", ".attention_layer_norm."),
    (".post_attention_layernorm.", ".feedforward_layer_norm."),
)
# Layers with a delta net have norms before what they add, those with attention behind it.
_NAMES = Names(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
    spellings=_SPELLINGS,
)
_OF_DELTA_NETS = Names(spellings=_SPELLINGS)
# Of the norm behind the delta rule, whatever the config says of the others.
_EPS = 1e-5


def olmo_hybrid(config: ModelConfig) -> Spec:
    """Describe OLMo Hybrid; if `rope_parameters` is null nothing rotates."""
    num_layers, num_heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    default = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(num_layers)]
    if "full_attention" not in default:
        default[-1] = "full_attention"
    kinds = layer_kinds(config, default, _KINDS)
    if set(kinds) != set(_KINDS):
        raise StartupError(f"config.json: `layer_types` must name both of {', '.join(_KINDS)}")
    key_heads = config.count("linear_num_key_heads", num_heads)
    key_dim = config.count("linear_key_head_dim", int(0.75 * config.count("hidden_size") / key_heads))
    mixer = GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=config.count("linear_num_value_heads", num_heads),
        key_dim=key_dim,
        value_dim=config.count("linear_value_head_dim", 2 * key_dim),
        width=config.count("linear_conv_kernel_dim", 4),
        packing="apart",
        most_strength=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
        eps=_EPS,
    )
    mixer.check(config)
    plain = base(config, default_positions=65536, names=_NAMES)
    if config.has("rope_parameters") and config.rope_block().get("rope_theta") is None:
        plain = replace(plain, ropes=(None,) * num_layers)
    mixers = tuple(mixer if kind == "linear_attention" else None for kind in kinds)
    return replace(plain, mixers=mixers, mixer_names=_OF_DELTA_NETS)
