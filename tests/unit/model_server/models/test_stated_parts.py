"""Biases and norms that config.json says are there, or are not, against the tensors."""

from __future__ import annotations

import pytest
from support.tiny_models import tiny_config

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.stated_parts import check_layers_alike, check_stated_parts

LAYER = "model.layers.0."
BIAS, NORM = LAYER + "self_attn.q_proj.bias", LAYER + "self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("model_type", "field", "tensor"),
    [
        ("llama", "attention_bias", BIAS),
        ("qwen3_moe", "attention_bias", BIAS),
        ("gpt_neox", "attention_bias", "gpt_neox.layers.0.attention.query_key_value.bias"),
        ("llama", "mlp_bias", LAYER + "mlp.up_proj.bias"),
        ("qwen2_moe", "qkv_bias", BIAS),
        ("stablelm", "use_qkv_bias", BIAS),
        ("phimoe", "lm_head_bias", "lm_head.bias"),
        ("stablelm", "qk_layernorm", LAYER + "self_attn.q_layernorm.norms.0.weight"),
        ("phi", "qk_layernorm", LAYER + "self_attn.q_layernorm.weight"),
        ("cohere", "use_qk_norm", NORM),
    ],
)
def test_what_the_config_says_there_is_not(model_type: str, field: str, tensor: str) -> None:
    assert field in tiny_config(model_type).to_dict()
    config = ModelConfig({"model_type": model_type, field: False})
    with pytest.raises(StartupError, match=f"`{field}` is false, but the files hold {tensor}"):
        check_stated_parts(config, [LAYER + "input_layernorm.weight", tensor])
    check_stated_parts(ModelConfig({"model_type": model_type, field: True}), [tensor])
    check_stated_parts(ModelConfig({"model_type": model_type}), [tensor])
    check_stated_parts(config, [LAYER + "input_layernorm.bias", LAYER + "self_attn.o_proj.weight"])


@pytest.mark.parametrize(("model_type", "field"), [("cohere", "use_qk_norm"), ("phi", "qk_layernorm")])
def test_norms_that_are_missing(model_type: str, field: str) -> None:
    config = ModelConfig({"model_type": model_type, field: True})
    with pytest.raises(StartupError, match=f"`{field}` is true, but the files hold no norms"):
        check_stated_parts(config, [BIAS])


def test_fields_of_other_types() -> None:
    check_stated_parts(ModelConfig({"model_type": "qwen2", "attention_bias": False}), [BIAS])
    check_stated_parts(ModelConfig({"model_type": "llama4_text", "use_qk_norm": True}), [])
    check_stated_parts(ModelConfig({"model_type": "llama", "attention_bias": False}), [NORM, LAYER + "attention.bias"])


def test_a_bias_that_other_layers_have() -> None:
    alike = [
        f"model.layers.{layer}.mlp.{name}" for layer in range(11) for name in ("up.weight", "up.bias", "gate.weight")
    ]
    layers = ("model.layers", "layers")
    check_layers_alike(layers, alike)
    # Modules with numbers of their own, as of Sequential, differ.
    check_layers_alike(
        layers, ["model.layers.0.mlp.0.weight", "model.layers.0.mlp.1.weight", "model.layers.0.mlp.1.bias"]
    )
    check_layers_alike(layers, ["vision.layers.0.up.weight", "vision.layers.1.up.weight", "vision.layers.1.up.bias"])
    alike.remove("model.layers.10.mlp.up.bias")
    with pytest.raises(
        StartupError,
        match=r"^weight model\.layers\.10\.mlp\.up\.bias does not exist, but model\.layers\.0\.mlp\.up\.bias does",
    ):
        check_layers_alike(layers, alike)


def test_layers_of_another_kind_may_have_other_biases() -> None:
    """As Kimi Linear's, whose attention has them and whose delta nets have not, under one name."""
    kinds = (None, "attention", None, "attention")
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(4)]
    names += [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in (1, 3)]
    check_layers_alike(("model.layers",), names, kinds)
    with pytest.raises(StartupError, match=r"^weight model\.layers\.1\.self_attn\.o_proj\.bias does not exist"):
        check_layers_alike(("model.layers",), names[:4] + names[5:], kinds)
