"""The text models of vision models, against transformers' whole models on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.library import THINKERS, make_case
from parity.protocol import CHUNKS, assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support.loading import load
from support.tiny_types import VOCAB_SIZE, type_model
from support.vision_models import mend_llama4

from model_server.models.decoder.decoder import Decoder
from model_server.models.families.vision import DEFAULTS, TEXT_TYPES

GLM = {"rope_parameters": {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}}
TEXT_OF: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm4v": GLM,
    "glm46v": GLM,
    "glm4v_moe": GLM,
    "mistral3": {"sliding_window": None},
    "llama4": {
        "interleave_moe_layer_step": 2, "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0] * 2,
    },
    "qwen3_vl_moe": {"mlp_only_layers": [1]},
}  # fmt: skip
# Prompts of PaliGemma are not causal: `parity.test_vision_images` has them, also without images.
# What reads nothing without a picture is compared in `test_language_models_that_wholes_hide`.
HIDDEN = ("blip-2", "instructblip", "instructblipvideo")
CAUSAL = sorted({*TEXT_TYPES, *THINKERS} - {"paligemma", *HIDDEN})
ALWAYS = ("gemma3", "qwen2_vl", "llava")


def make(model_type: str) -> Any:
    """transformers' model with random weights that tell a forgotten one."""
    mend_llama4()
    return type_model(model_type, text_config=TEXT_OF.get(model_type, {}))


@pytest.fixture(params=[pytest.param(one, marks=() if one in ALWAYS else pytest.mark.parity) for one in CAUSAL])
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_equal(folder: Path, sequences: list[torch.Tensor], logits: list[torch.Tensor]) -> None:
    runner = load(folder)
    assert isinstance(runner, Decoder)
    assert_equal_logits(run_protocol(runner, sequences, 4, steps=CHUNKS), logits)


def test_text_alone_equals_transformers(model_type: str, tmp_path: Path) -> None:
    """As transformers writes the files today, and with tensors named as in older files."""
    mend_llama4()
    text = {"text_config": TEXT_OF[model_type]} if model_type in TEXT_OF else {}
    case = make_case(model_type, tmp_path, **text)
    sequences, logits = case.sequences, case.logits
    assert_equal(tmp_path, sequences, logits)

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    base = next(name for name in tensors if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    other = "model.text_model." if base != "model.text_model." else "language_model.model."
    renamed = {other + name.removeprefix(base) if name.startswith(base) else name: one for name, one in tensors.items()}
    save_file(renamed, file)
    assert_equal(tmp_path, sequences, logits)


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_tokens_of_images_and_sound_are_read_as_padding(model_type: str, tmp_path: Path) -> None:
    tokens = prompts(VOCAB_SIZE)[0].unique()[-3:].tolist()
    named = dict(zip(("image_token_id", "video_token_id", "audio_token_id"), tokens, strict=True))
    case = make_case(model_type, tmp_path, **named)
    assert set(tokens) <= set(case.sequences[0].tolist())
    assert_equal(tmp_path, case.sequences, case.logits)


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


@pytest.mark.parity
def test_public_files_of_qwen35_hold_layers_that_draft_and_experts_in_one_tensor(tmp_path: Path) -> None:
    case = make_case("qwen3_5_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {f"mtp.{name}.weight": torch.ones(2, 2) for name in ("fc", "layers.0.mlp.gate")}
    for index in range(4):
        prefix = f"model.language_model.layers.{index}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{number}.{part}_proj.weight") for number in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}
    save_file(tensors, file)
    assert_equal(tmp_path, case.sequences, case.logits)


@pytest.mark.parity
@pytest.mark.parametrize("model_type", HIDDEN)
def test_language_models_that_wholes_hide(model_type: str, tmp_path: Path) -> None:
    case = make_case(model_type, tmp_path)
    assert_equal(tmp_path, case.sequences, case.logits)


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
