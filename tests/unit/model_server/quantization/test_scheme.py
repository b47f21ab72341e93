"""What a config says of quantization, beside `--quantize`: what is served, and what is refused in which words."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from model_server.errors import StartupError
from model_server.models.model import describe
from model_server.quantization.scheme import resolve
from model_server.weights.checkpoint import Checkpoint
from model_server.weights.header import Header, Stored


def checkpoint(
    directory: Path = Path("m"), tensors: dict[str, tuple[int, ...]] | None = None, **fields: Any
) -> Checkpoint:
    stored = {name: Stored("I32", shape, 0, 0) for name, shape in (tensors or {}).items()}
    return Checkpoint(directory=directory, fields=fields, headers={Path("f"): Header(stored)}, file_bytes=0)


def quantized(method: str = "gptq", **more: Any) -> Checkpoint:
    return checkpoint(quantization_config={"quant_method": method, **more})


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"compression_config": {"quant_method": "awq"}}, "awq"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"quantization_config": {"quant_method": "auto-round"}}, "auto-round"),
    ],
)
def test_what_a_config_says(fields: dict[str, Any], wanted: str | None) -> None:
    assert resolve(checkpoint(**fields)).method == wanted


def test_what_the_tensors_say(tmp_path: Path) -> None:
    """Old files have no word of it in config.json."""
    shapes = {"m.qweight": (8, 64), "m.scales": (2, 64)}
    assert resolve(checkpoint(tmp_path, shapes)).method == "gptq"
    assert resolve(checkpoint(tmp_path, shapes | {"m.qweight": (64, 8)})).method == "awq"
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "quant_method": "gptq"}))
    assert resolve(checkpoint(tmp_path, shapes)).method == "gptq"


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "olmo", "no such type"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_other_methods_are_refused_whatever_the_model(key: str, model_type: str) -> None:
    found = checkpoint(model_type=model_type, **{key: {"quant_method": "hqq"}})
    with pytest.raises(StartupError, match=r"^demo is quantized with hqq, which is not served; served are gptq, awq"):
        describe(found, name="demo")


@pytest.mark.parametrize("flag", ["gptq", "awq", "exl2", "marlin", "compressed-tensors"])
def test_a_stored_format_is_asked_of_plain_weights(flag: str) -> None:
    text = (
        rf"^`--quantize {flag}` names a stored format, but m holds plain weights; leave it out, or quantize on load "
        r"with fp8, eetq or bitsandbytes-nf4$"
    )
    with pytest.raises(StartupError, match=text):
        resolve(checkpoint(), flag)


@pytest.mark.parametrize("flag", ["eetq", "bitsandbytes", "bitsandbytes-nf4", "fp8"])
def test_quantized_weights_are_not_quantized_again(flag: str) -> None:
    text = rf"^`--quantize {flag}` quantizes plain weights on load, but m is stored as awq; leave it out$"
    with pytest.raises(StartupError, match=text):
        resolve(quantized("awq"), flag)


@pytest.mark.parametrize("flag", ["bitsandbytes-nf4", "bitsandbytes-fp4"])
def test_what_is_not_quantized_on_load(flag: str) -> None:
    with pytest.raises(StartupError, match=rf"^`--quantize {flag}` is not served; of plain weights served are .*eetq"):
        resolve(checkpoint(), flag)


@pytest.mark.parametrize(
    ("method", "flag", "warns"),
    [("gptq", "gptq", False), ("gptq", "marlin", False), ("awq", "gptq", False), ("awq", "exl2", True)],
)
def test_the_file_wins(method: str, flag: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve(quantized(method), flag).method == method
    assert ("names another format" in caplog.text) is warns


def test_types_of_the_transformers_runner() -> None:
    found = checkpoint(model_type="no such type", quantization_config={"quant_method": "gptq"})
    with pytest.raises(StartupError, match=r"^no such type is stored as gptq; the transformers runner serves plain"):
        describe(found)
