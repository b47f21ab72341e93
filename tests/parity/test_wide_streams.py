"""Mamba's residual stream is float32 where the model is 16 bits wide, as transformers adds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CHUNKS, CPU, STEPS, prompts, run_protocol
from support.loading import load
from support.tiny_models import random_model
from torch import Tensor

from model_server.cpp.config import SWITCH
from model_server.cpp.library import usable
from model_server.layers.norm import OfWideStream
from model_server.models.decoder.blocks import SingleBlock
from model_server.models.decoder.decoder import Decoder

LAYERS = 12


def checkpoint(model_type: str, path: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Write a model whose layers add little to what is there; its prompts, and transformers' logits in bfloat16."""
    model: Any = random_model(model_type, num_hidden_layers=LAYERS)
    with torch.no_grad():
        model.backbone.embeddings.weight.mul_(64)
    model = model.bfloat16()
    model.save_pretrained(path)
    sequences = prompts(model.config.vocab_size)
    with torch.inference_mode():
        return sequences, [model(one.unsqueeze(0), use_cache=False).logits[0].float() for one in sequences]


def without_wide_stream(path: Path) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "residual_in_fp32": False}))


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    a, b = torch.cat(list(found)), torch.cat(list(expected))
    return float((a - b).abs().mean() / b.abs().mean())


# The scans of Mamba 2 are rounded elsewhere than transformers' are, whose error stays.
@pytest.mark.parametrize(
    ("model_type", "factor"),
    [("mamba", 0.6), ("mamba2", 0.8), pytest.param("falcon_mamba", 0.6, marks=pytest.mark.parity)],
)
def test_what_layers_add_up_is_as_transformers_rounds_it(model_type: str, factor: float, tmp_path: Path) -> None:
    sequences, expected = checkpoint(model_type, tmp_path)
    wide = run_protocol(load(tmp_path, dtype=torch.bfloat16), sequences, 4, torch.bfloat16)
    without_wide_stream(tmp_path)
    narrow = run_protocol(load(tmp_path, dtype=torch.bfloat16), sequences, 4, torch.bfloat16)
    assert error(wide, expected) < factor * error(narrow, expected)


@pytest.mark.parametrize(("dtype", "is_wider"), [(torch.float32, False), (torch.bfloat16, True)])
def test_float32_has_the_fused_norms(dtype: torch.dtype, is_wider: bool, tmp_path: Path) -> None:
    checkpoint("mamba", tmp_path)
    runner = load(tmp_path, dtype=dtype)
    assert isinstance(runner, Decoder)
    for block in runner._blocks:
        assert isinstance(block, SingleBlock)
        assert isinstance(block.norm, OfWideStream) is is_wider


@pytest.mark.skipif(not usable(CPU, torch.bfloat16), reason="no C++ operators")
@pytest.mark.parametrize("model_type", ["mamba", pytest.param("mamba2", marks=pytest.mark.parity)])
def test_chunks_give_the_same_bits(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")  # products in C++, too
    sequences, _ = checkpoint(model_type, tmp_path)
    runner = load(tmp_path, dtype=torch.bfloat16)
    whole, chunks = (run_protocol(runner, sequences, 4, torch.bfloat16, steps=steps) for steps in (STEPS, CHUNKS))
    assert all(torch.equal(a, b) for a, b in zip(whole, chunks, strict=True))
