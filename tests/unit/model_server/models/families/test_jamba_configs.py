"""Configs of Jamba and of Mamba alone: which layers are what, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny_models import tiny_config

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.mixers.mamba1 import Mamba1Spec
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.spec import Spec
from model_server.models.families import spec_of


def spec(**fields: Any) -> Spec:
    return spec_of(ModelConfig({**tiny_config("jamba").to_dict(), **fields}))


def test_layers_of_the_published_sizes() -> None:
    """Attention in each eighth layer, experts in each second one; the rank is a sixteenth of the width."""
    sizes = {"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4, "hidden_size": 4096}
    found = spec(**sizes, expert_layer_period=2, expert_layer_offset=1, mamba_dt_rank="auto")
    assert [index for index, mixer in enumerate(found.mixers) if mixer is None] == [4, 12, 20, 28]
    assert [isinstance(mlp, Moe) for mlp in found.mlps] == [False, True] * 16
    mixer = found.mixers[0]
    assert isinstance(mixer, Mamba1Spec) and (mixer.channels, mixer.rank) == (8192, 256)
    assert set(found.ropes) == {None}
    assert set(spec(num_experts=1).mlps) == {None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_layer_offset": 9, "attn_layer_period": 8}, r"`attn_layer_offset` \(9\) must be below"),
        ({"expert_layer_offset": 2, "expert_layer_period": 2}, r"`expert_layer_offset` \(2\) must be below"),
        ({"mamba_d_conv": 1}, "`mamba_d_conv` must be at least 2"),
        ({"hidden_act": "gelu"}, "`hidden_act` is served for jamba as 'silu' only"),
        ({"num_experts_per_tok": 99}, "`num_experts_per_tok` is 99, but there are 4 experts"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec(**fields)


def test_a_model_without_any_layer_of_attention() -> None:
    assert None not in spec(num_hidden_layers=2, attn_layer_period=8, attn_layer_offset=4).mixers


MAMBA = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}


def test_models_of_mamba_alone() -> None:
    """Of `intermediate_size` and `expand` the first counts, as published files of Falcon Mamba have it."""
    [mixer] = set(spec_of(ModelConfig({**MAMBA, "intermediate_size": 96, "expand": 16})).mixers)
    assert isinstance(mixer, Mamba1Spec) and (mixer.channels, mixer.rank, mixer.norms) == (96, 4, None)
    falcon = spec_of(ModelConfig({**MAMBA, "model_type": "falcon_mamba", "mixer_rms_eps": 0.5}))
    assert isinstance(falcon.mixers[0], Mamba1Spec)
    assert (falcon.mixers[0].channels, falcon.mixers[0].norms, falcon.mixers[0].norm_eps) == (128, "ones", 0.5)
    assert falcon.tied_head and falcon.max_positions is None
    sizes = {"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "n_groups": 3}
    with pytest.raises(StartupError, match="in 3 equal groups"):
        spec_of(ModelConfig({**MAMBA, **sizes}))
    with pytest.raises(StartupError, match="`conv_kernel` must be at least 2"):
        spec_of(ModelConfig({**MAMBA, "conv_kernel": 1}))
    with pytest.raises(StartupError, match="`hidden_act` is served for mamba as 'silu' only"):
        spec_of(ModelConfig({**MAMBA, "hidden_act": "gelu"}))
