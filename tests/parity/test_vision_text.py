"""The text models of vision models, against transformers' whole models on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CHUNKS, assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support.loading import load
from support.vision_models import mend_llama4

from model_server.models.decoder.decoder import Decoder
from model_server.models.families.vision import DEFAULTS, TEXT_TYPES

VOCAB_SIZE = 256
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
GLM = {"rope_parameters": MROPE | {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}}
TEXT_OF: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "glm4v": GLM,
    "glm46v": GLM,
    "mistral3": {"sliding_window": None},
    "llama4": {
        "intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "no_rope_layers": [1, 0, 1],
    },
    "qwen2_vl": {"rope_parameters": MROPE},
    "qwen2_5_vl": {"rope_parameters": MROPE},
    "qwen3_vl": {"rope_parameters": MROPE},
    "qwen3_vl_moe": {
        "rope_parameters": MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "aya_vision": {"sliding_window": 8},
}  # fmt: skip
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_heads": 2,
    "depth": 1, "embed_dim": 32, "image_size": 28, "patch_size": 14, "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32, "projection_dim": 32,
    "fullatt_block_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
# Prompts of PaliGemma are not causal: `parity.test_vision_images` has them, also without images.
CAUSAL = sorted(set(TEXT_TYPES) - {"paligemma"})
ALWAYS = ("gemma3", "qwen2_vl", "llava")


def make(model_type: str) -> Any:
    """transformers' model with random weights that tell a forgotten one."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    known = AutoConfig.for_model(model_type).vision_config
    vision = {name: value for name, value in SMALL.items() if hasattr(known, name)}
    if model_type == "qwen2_vl":
        vision["hidden_size"] = 64
    if model_type == "internvl":
        vision |= {"image_size": [28, 28], "patch_size": [14, 14]}
    text = {"model_type": TEXT_TYPES[model_type], **TEXT, **TEXT_OF.get(model_type, {})}
    if model_type.startswith("qwen"):
        del text["model_type"]
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    mend_llama4()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.dim() >= 2 else parameter + noise * 0.1)
    return model


@pytest.fixture(params=[pytest.param(one, marks=() if one in ALWAYS else pytest.mark.parity) for one in CAUSAL])
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_equal(folder: Path, sequences: list[torch.Tensor], logits: list[torch.Tensor]) -> None:
    runner = load(folder)
    assert isinstance(runner, Decoder)
    assert_equal_logits(run_protocol(runner, sequences, 4, steps=CHUNKS), logits)


def test_text_alone_equals_transformers(model_type: str, tmp_path: Path) -> None:
    """As transformers writes the files today, and with tensors named as in older files."""
    model = make(model_type)
    model.save_pretrained(tmp_path)
    sequences = prompts(VOCAB_SIZE)
    with torch.inference_mode():
        logits = [model(input_ids=one.unsqueeze(0), use_cache=False).logits[0] for one in sequences]
    assert_equal(tmp_path, sequences, logits)

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    base = next(name for name in tensors if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    other = "model.text_model." if base != "model.text_model." else "language_model.model."
    renamed = {other + name.removeprefix(base) if name.startswith(base) else name: one for name, one in tensors.items()}
    save_file(renamed, file)
    assert_equal(tmp_path, sequences, logits)


def test_experts_of_public_files_are_stored_the_other_way_round(tmp_path: Path) -> None:
    """Those of Qwen 3 VL MoE; transformers writes them as it computes with them."""
    model = make("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    turned = {name: one.transpose(1, 2).contiguous() if ".experts." in name else one for name, one in tensors.items()}
    assert any(one.shape != tensors[name].shape for name, one in turned.items())
    save_file(turned, file)
    sequences = prompts(VOCAB_SIZE)
    with torch.inference_mode():
        logits = [model(input_ids=one.unsqueeze(0), use_cache=False).logits[0] for one in sequences]
    assert_equal(tmp_path, sequences, logits)


@pytest.mark.parametrize("text_type", sorted(DEFAULTS))
def test_defaults_are_those_of_transformers(text_type: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(text_type)
    assert {name: getattr(config, name) for name in DEFAULTS[text_type]} == DEFAULTS[text_type]


def test_config_without_text_config(tmp_path: Path) -> None:
    """The first files of Qwen 2 VL."""
    model = make("qwen2_vl")
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    old = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    file.write_text(json.dumps({**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": old}))
    sequences = prompts(VOCAB_SIZE)
    with torch.inference_mode():
        logits = [model(input_ids=one.unsqueeze(0), use_cache=False).logits[0] for one in sequences]
    assert_equal(tmp_path, sequences, logits)
