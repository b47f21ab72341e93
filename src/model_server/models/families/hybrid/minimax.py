"""MiniMax Text 01 and M1: lightning attention in most layers, Mixtral's experts in all."""

from __future__ import annotations

from dataclasses import replace

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.mixers.lightning import LightningSpec
from model_server.models.decoder.spec import Spec, StreamFactors
from model_server.models.families.base import layer_kinds, rotary_dim
from model_server.models.families.moe import mixtral

_KINDS = ("full_attention", "linear_attention")
# Made from the heads' decays, and stored beside them.
_LEFT_OVER = (r"\.self_attn\.(query|key|diagonal)_decay$",)


def minimax(config: ModelConfig) -> Spec:
    """Describe MiniMax: a block's residual stream is what its norms give, times a factor."""
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        raise StartupError("config.json: `hidden_act` is served for minimax as 'silu' only")
    plain = mixtral(config)
    default = [_KINDS[index % 2] for index in range(plain.num_layers)]
    kinds = layer_kinds(config, default, _KINDS)
    mixer = LightningSpec(heads=plain.num_heads, head_dim=plain.head_dim)

    def factors(part: str) -> tuple[float, float]:
        alpha, beta = f"{part}_alpha_factor", f"{part}_beta_factor"
        return config.number(alpha, 1.0), config.number(beta, 1.0)

    of_kind = {
        "full_attention": StreamFactors(factors("full_attn"), factors("mlp")),
        "linear_attention": StreamFactors(factors("linear_attn"), factors("mlp")),
    }
    ropes = plain.ropes
    # As in the code of the published models; transformers ignores the field.
    if config.get("rotary_dim") is not None and plain.max_positions is not None:
        share = config.replaced(partial_rotary_factor=config.count("rotary_dim") / plain.head_dim)
        rope = config.rope(rotary_dim(share, plain.head_dim, 1.0), plain.max_positions, theta=1e6)
        ropes = (rope,) * plain.num_layers
    return replace(
        plain,
        ropes=ropes,
        block="normed",
        factors=tuple(of_kind[kind] for kind in kinds),
        mixers=tuple(mixer if kind == "linear_attention" else None for kind in kinds),
        left_over=_LEFT_OVER,
    )
