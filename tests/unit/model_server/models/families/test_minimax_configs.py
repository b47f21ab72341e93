"""MiniMax Text 01: which layers are what, what is refused, tensors that follow from the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.loading import load
from support.tiny_models import tiny_checkpoint, tiny_config

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.mixers.lightning import LightningSpec
from model_server.models.decoder.spec import Spec, StreamFactors
from model_server.models.families import spec_of

WEIGHTS = "model.safetensors"
RATES = "model.layers.0.self_attn.slope_rate"


def spec(**fields: Any) -> Spec:
    return spec_of(ModelConfig({**tiny_config("minimax").to_dict(), **fields}))


def test_layers_and_factors() -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    found = spec(layer_types=kinds, full_attn_alpha_factor=3, linear_attn_beta_factor=0.5, mlp_beta_factor=2)
    assert [isinstance(mixer, LightningSpec) for mixer in found.mixers] == [True, False] * 2
    assert found.factors[0] == StreamFactors((1.25, 0.5), (0.8, 2))
    assert found.factors[1] == StreamFactors((3, 0.7), (0.8, 2))
    assert [mixer is None for mixer in spec(layer_types=None).mixers] == [True, False] * 2


def test_a_part_of_a_head_may_rotate() -> None:
    """As in the code of the published models, whatever transformers makes of the field."""
    half, whole = spec(rotary_dim=8).ropes[0], spec().ropes[0]
    assert half is not None and whole is not None and (half.dim, whole.dim) == (8, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act` is served for minimax as 'silu' only"),
        ({"layer_types": ["mamba"] * 4}, "`layer_types` must name 4 times one of full_attention, linear_attention"),
        ({"num_experts_per_tok": 99}, "`num_experts_per_tok` is 99, but there are 4 experts"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec(**fields)


def test_stored_decays_are_those_of_the_rule(tmp_path: Path) -> None:
    """Files may leave them out, or have them rounded; others are refused instead of ignored."""
    folder = tiny_checkpoint("minimax", tmp_path, with_tokenizer=False)
    tensors = load_file(folder / WEIGHTS)
    assert tensors[RATES].shape == (4, 1, 1)
    without = {name: tensor for name, tensor in tensors.items() if name != RATES}
    rounded = ({name: tensor.to(dtype) for name, tensor in tensors.items()} for dtype in (torch.bfloat16, torch.half))
    for stored in (without, *rounded):  # float16 rounds the rates of the last layer to 0
        save_file(stored, folder / WEIGHTS, {"format": "pt"})
        load(folder)
    save_file(tensors | {RATES: tensors[RATES] * 1.1}, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(StartupError, match=rf"weight {RATES}: heads that decay at other rates than MiniMax's rule"):
        load(folder)
