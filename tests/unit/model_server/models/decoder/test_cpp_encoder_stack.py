"""All blocks of an encoder in one native call: which models get it, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.encoder_models import write_model
from support.pooling import items_of, load_pooled, run

from model_server.cpp.library import library
from model_server.models.decoder.cpp_encoder_stack import CppEncoderStack
from model_server.models.decoder.decoder import Decoder
from model_server.pooling.items import Kind
from model_server.pooling.native import NativeModel
from model_server.pooling.runner import PoolingRunner

# Norms behind the sums, rotations, gated MLPs; norms before them and windows.
STACKED = ("bert", "roberta", "distilbert", "nomic_bert", "gte", "modernbert")
# Llama's blocks, in the stack of theirs.
OTHERS = ("eurobert", "qwen3")
TEXTS = ["what is rain", "a", "the rain in detail falls from the clouds and the water is good for fish and cats"]


def _decoder(runner: PoolingRunner) -> Decoder:
    assert isinstance(runner.model, NativeModel)
    return runner.model._decoder


@pytest.mark.parametrize("case", STACKED + OTHERS)
def test_who_is_stacked(tmp_path: Path, case: str) -> None:
    write_model(tmp_path, case)
    stack = _decoder(load_pooled(tmp_path, task="embed", pooling="mean"))._stack
    assert isinstance(stack, CppEncoderStack) == (case in STACKED and library() is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["bert", "gte", "modernbert"])
def test_equals_the_blocks(tmp_path: Path, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, case)
    runner = load_pooled(tmp_path, task="embed", pooling="mean", dtype=dtype)
    items = items_of(tmp_path, TEXTS, Kind.TOKENS, 48)
    stacked = run(runner, items)
    monkeypatch.setattr(_decoder(runner), "_stack", None)
    tolerance = 2e-6 if dtype is torch.float32 else 4e-2
    for ours, theirs in zip(stacked, run(runner, items), strict=True):
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()
