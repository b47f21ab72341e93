"""What people call a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wire.text.model_name import quantization_name, short_name


@pytest.mark.parametrize(("model_id", "name"), [
    ("demo", "demo"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
    ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"), ("./here.GGUF", "here"), ("~/models/x", "x"), ("../y", "y"),
    ("org/repo-GGUF/sub/file-Q8_0.gguf", "file-Q8_0"), ("/", "/"),
])  # fmt: skip
def test_the_name_of_a_path_is_its_last_part(model_id: str, name: str) -> None:
    assert short_name(model_id) == name


def test_a_folder_below_this_one_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert short_name("models/mine") == "mine"
    monkeypatch.chdir(tmp_path / "models" / "mine")
    assert short_name(".") == "mine"


@pytest.mark.parametrize(("said", "name"), [
    (None, None), ("x", None), ({}, None), ({"quant_method": "gguf", "file_type": "Q4_K_M"}, "Q4_K_M"),
    ({"quant_method": "gptq", "bits": 4}, "gptq, 4 bits"), ({"quant_method": "awq", "w_bit": 4}, "awq, 4 bits"),
    ({"quant_method": "fp8"}, "fp8"), ({"quant_method": "gguf"}, "gguf"),
])  # fmt: skip
def test_how_weights_are_quantized(said: Any, name: str | None) -> None:
    assert quantization_name({"quantization_config": said}) == name
