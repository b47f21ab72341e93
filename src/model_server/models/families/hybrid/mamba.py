"""Mamba, Falcon Mamba and Mamba-2: a mixer in each layer, and nothing else."""

from __future__ import annotations

from typing import Literal

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.mixers.mamba1 import Mamba1Spec
from model_server.models.decoder.mixers.mamba2 import Mamba2Spec
from model_server.models.decoder.mixers.nothing import Nothing
from model_server.models.decoder.spec import MixerSpec, Names, Spec
from model_server.models.families.base import base
from model_server.models.families.hybrid.mamba2 import time_limits

_NAMES = Names(
    base="backbone.",
    embedding="backbone.embeddings",
    layers="backbone.layers",
    attention_norm="norm",
    mlp_norm=None,
    norm="backbone.norm_f",
)
_PREFIX = "mixer."


def mamba(config: ModelConfig) -> Spec:
    """Describe Mamba."""
    return _alone(config, _mamba1(config), tied=True)


def falcon_mamba(config: ModelConfig) -> Spec:
    """Describe Falcon Mamba: what is chosen has norms without weights."""
    eps = config.number("mixer_rms_eps", 1e-6)
    return _alone(config, _mamba1(config, norms="ones", norm_eps=eps), tied=True)


def mamba2(config: ModelConfig) -> Spec:
    """Describe Mamba-2."""
    heads, groups = config.count("num_heads", 128), config.count("n_groups", 8)
    head_dim, values = config.count("head_dim", 64), config.count("expand", 2) * config.count("hidden_size")
    if heads * head_dim != values or heads % groups != 0:
        raise StartupError(
            f"config.json: `num_heads` ({heads}) of `head_dim` ({head_dim}) must be {values} numbers in all, in "
            f"{groups} equal groups (`n_groups`)"
        )
    mixer = Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=config.count("state_size", 128),
        width=_width(config),
        limits=time_limits(config),
        prefix=_PREFIX,
    )
    return _alone(config, mixer, tied=False)


def _mamba1(
    config: ModelConfig, *, norms: Literal["stored", "ones"] | None = None, norm_eps: float = 1e-6
) -> Mamba1Spec:
    size, is_auto = config.count("hidden_size"), config.get("time_step_rank") in (None, "auto")
    return Mamba1Spec(
        # Which counts where both are given: Falcon Mamba's `expand` is another number.
        channels=config.count("intermediate_size", config.count("expand", 2) * size),
        state_size=config.count("state_size", 16),
        rank=-(-size // 16) if is_auto else config.count("time_step_rank"),
        width=_width(config),
        prefix=_PREFIX,
        norms=norms,
        norm_eps=norm_eps,
    )


def _width(config: ModelConfig) -> int:
    width = config.count("conv_kernel", 4)
    if width < 2:
        raise StartupError("config.json: `conv_kernel` must be at least 2, got 1")
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        raise StartupError(f"config.json: `hidden_act` is served for {config.model_type} as 'silu' only")
    return width


def _alone(config: ModelConfig, mixer: MixerSpec, *, tied: bool) -> Spec:
    """Describe layers of the mixer alone, any number of tokens long."""
    num_layers = config.count("num_hidden_layers")
    # Of attention that there is not.
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1, "max_position_embeddings": None}
    return base(
        config.renamed({"rms_norm_eps": "layer_norm_epsilon"}).replaced(**heads),
        default_eps=1e-5,
        tied=tied,
        names=_NAMES,
        block="single",
        wide_stream=config.flag("residual_in_fp32", True),
        intermediate_size=config.count("hidden_size"),
        max_positions=None,
        ropes=(None,) * num_layers,
        mixers=(mixer,) * num_layers,
        mlps=(Nothing(),) * num_layers,
    )
