"""What a config says of quantization, and that such a checkpoint is refused whatever its model type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_server.errors import StartupError
from model_server.models.model import describe
from model_server.quantization.scheme import Quantization, quantization_of
from model_server.weights.checkpoint import Checkpoint


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, Quantization("gptq")),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, Quantization("compressed-tensors")),
        ({"quantization_config": {"bits": 4}}, Quantization("unknown")),
    ],
)
def test_what_a_config_says(fields: dict[str, Any], wanted: Quantization | None) -> None:
    assert quantization_of(fields) == wanted


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "olmo", "no such type"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantized_checkpoints_are_refused(key: str, model_type: str) -> None:
    fields = {"model_type": model_type, key: {"quant_method": "gptq"}}
    checkpoint = Checkpoint(directory=Path("m"), fields=fields, headers={}, file_bytes=0)
    with pytest.raises(StartupError, match=r"the checkpoint is quantized \(gptq\), which this version does not serve"):
        describe(checkpoint)
