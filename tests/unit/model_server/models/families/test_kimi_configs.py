"""Configs and files of Kimi Linear: what is refused, and what has several spellings."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny_models import tiny_config

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.mixers.kimi_delta import KimiDeltaSpec
from model_server.models.decoder.spec import Spec
from model_server.models.families import spec_of

LAYERS = {"full_attn_layers": [3], "kda_layers": [1, 2, 4]}


def spec(**fields: Any) -> Spec:
    return spec_of(ModelConfig({**tiny_config("kimi_linear").to_dict(), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "no layer has attention, which is not served"),
        ({"layer_types": ["mamba"] * 4}, "`layer_types` must name 4 times one of"),
        ({"linear_attn_config": [1]}, "`linear_attn_config` must be an object"),
        (
            {"layer_types": None, "linear_attn_config": {**LAYERS, "kda_layers": [1, 2]}},
            "name the layers 1 to 4, each once",
        ),
        ({"layer_types": None, "linear_attn_config": {**LAYERS, "kda_layers": "all"}}, "`kda_layers` must be a list"),
        ({"linear_conv_kernel_dim": 1}, "`linear_conv_kernel_dim` must be at least 2"),
        ({"linear_attn_config": {**LAYERS, "short_conv_kernel_size": 1}}, "`short_conv_kernel_size` must be at least"),
        ({"hidden_act": "gelu"}, "`hidden_act` is served for kimi_linear as 'silu' only"),
        ({"mla_use_nope": False}, "`mla_use_nope` is served for kimi_linear as True only"),
        (
            {"num_experts": 4, "num_expert_group": 3},
            r"`num_experts` \(4\) is not a multiple of `num_expert_group` \(3\)",
        ),
        (
            {"moe_router_activation_func": "softmax"},
            "`moe_router_activation_func` is served for kimi_linear as 'sigmoid' only",
        ),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec(**fields)


def test_layers_and_sizes_as_published() -> None:
    block = {**LAYERS, "num_heads": 6, "head_dim": 16, "short_conv_kernel_size": 3}
    found = spec(layer_types=None, linear_attn_config=block)
    assert found.mixers[0] == KimiDeltaSpec(heads=6, head_dim=16, width=3)
    assert [one is None for one in found.mixers] == [False, False, True, False]
