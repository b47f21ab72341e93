"""How configs name what is stored: which of a method's ways are served, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_server.errors import StartupError
from model_server.quantization.methods import method_of
from model_server.quantization.scheme import resolve
from model_server.weights.checkpoint import Checkpoint

CT = "compressed-tensors"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"bits": 4}, "unknown"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "modelopt NVFP4"),
        ({"quant_method": "modelopt"}, "modelopt None"),
        ({"quant_method": CT, "format": "pack-quantized"}, CT),
        ({"quant_method": CT, "format": "nvfp4-pack-quantized"}, f"{CT} nvfp4-pack-quantized"),
        ({"quant_method": CT, "sparsity_config": {"format": "dense"}}, CT),
        ({"quant_method": CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, f"{CT} sparse-24-bitmask"),
        ({"quant_method": CT, "transform_config": {"config_groups": {"u": {}}}}, f"{CT} with transforms"),
        ({"quant_method": CT, "transform_config": {}}, CT),
    ],
)
def test_what_a_config_names(config: dict[str, Any], named: str) -> None:
    assert method_of(config) == named


def checkpoint(config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(directory=Path("m"), fields={"quantization_config": config}, headers={}, file_bytes=0)


def test_what_no_format_reads_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match=r"^m is quantized with modelopt NVFP4, which is not served; served are "):
        resolve(checkpoint({"quant_method": "modelopt", "quant_algo": "NVFP4"}))


@pytest.mark.parametrize("status", ["initialized", "calibration", "compressed", "frozen"])
def test_a_quantization_that_was_not_finished(status: str) -> None:
    config = {"quant_method": CT, "quantization_status": status}
    if status in ("compressed", "frozen"):
        assert resolve(checkpoint(config)).method == CT
        return
    with pytest.raises(StartupError, match=rf"^the quantization of m was not finished \(status {status}\)$"):
        resolve(checkpoint(config))


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_fp8_of_a_folder_that_is_fp8(method: str) -> None:
    scheme = resolve(checkpoint({"quant_method": method}), "fp8")
    assert scheme.method == method
    assert scheme.quantize is None


def test_fp8_of_a_folder_of_another_method() -> None:
    message = r"^`--quantize fp8` quantizes plain weights on load, but m is stored as awq; leave it out$"
    with pytest.raises(StartupError, match=message):
        resolve(checkpoint({"quant_method": "awq"}), "fp8")
