"""Configs of families with Mamba-2: what is refused, and what has several spellings."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny_models import tiny_config

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.mixers.mamba2 import Mamba2Spec
from model_server.models.decoder.spec import Spec
from model_server.models.families import spec_of


def spec(model_type: str, **fields: Any) -> Spec:
    return spec_of(ModelConfig({**tiny_config(model_type).to_dict(), **fields}))


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "`layer_types` must name 4 times one of"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "must be null or 'rope', got 'alibi'"),
        ("bamba", {"mamba_n_groups": 3}, "in 3 equal groups"),
        ("bamba", {"mamba_d_conv": 1}, "`mamba_d_conv` must be at least 2"),
        ("bamba", {"hidden_act": "gelu"}, "`hidden_act` is served for bamba as 'silu' only"),
        ("bamba", {"time_step_limit": [0.5, 0.1]}, "`time_step_limit` must be two ascending numbers"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "`ssm_multipliers` must be 5 numbers"),
        ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, "`layers_block_type` must name each layer"),
        ("nemotron_h", {"n_groups": 3}, r"`mamba_num_heads` \(8\) is not a multiple of `n_groups` \(3\)"),
        ("nemotron_h", {"n_group": 3}, r"`n_routed_experts` \(8\) is not a multiple of `n_group` \(3\)"),
    ],
)
def test_configs_that_are_refused(model_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec(model_type, **fields)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}),
        ("bamba", {"attn_layer_indices": []}),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp"]}),
    ],
)
def test_models_without_any_layer_of_attention(model_type: str, fields: dict[str, Any]) -> None:
    assert None not in spec(model_type, **fields).mixers


def test_layers_by_signs_and_by_their_first_names() -> None:
    named = spec("nemotron_h", layers_block_type=["mamba", "attention", "mlp"])
    assert spec("nemotron_h", layers_block_type=None, hybrid_override_pattern="M*-").mixers == named.mixers
    assert isinstance(named.mixers[0], Mamba2Spec) and named.mixers[1] is None and named.num_layers == 3


def test_a_limit_as_transformers_writes_it() -> None:
    limit = [0.0, {"__float__": "Infinity"}]
    [mixer] = {one for one in spec("bamba", time_step_limit=limit).mixers if one is not None}
    assert isinstance(mixer, Mamba2Spec) and mixer.limits == (0.0, float("inf"))
