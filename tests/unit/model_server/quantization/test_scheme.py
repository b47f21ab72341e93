"""What a config says of quantization, beside `--quantize`: what is served, and what is refused in which words."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model_server.cli import _refuse_quantized
from model_server.config import DownloadConfig
from model_server.errors import StartupError
from model_server.models.model import check_family, describe
from model_server.quantization.described import said_of_weights
from model_server.quantization.onload import QUANTIZERS
from model_server.quantization.scheme import resolve
from model_server.weights.checkpoint import Checkpoint, examine
from model_server.weights.header import Header, Stored
from wire.quantization.methods import ON_LOAD, Quantize


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


def test_a_refusal_of_the_flag() -> None:
    with pytest.raises(StartupError, match=r"^`--quantize gptq` names a stored format, but m holds plain weights; "):
        resolve(checkpoint(), "gptq")


@pytest.mark.parametrize(("method", "flag", "warns"), [("gptq", "marlin", False), ("awq", "exl2", True)])
def test_the_file_wins(method: str, flag: str, warns: bool) -> None:
    scheme = resolve(quantized(method), flag)
    assert scheme.method == method
    assert (scheme.warning is not None) is warns


def test_fp8_of_a_folder_that_is_fp8() -> None:
    assert resolve(quantized("fp8"), "fp8").quantize is None
    assert resolve(checkpoint(), "fp8").quantize is not None


def test_every_word_that_quantizes_on_load_has_its_function() -> None:
    assert set(QUANTIZERS) == set(ON_LOAD)


def test_modules_that_stay_plain_on_load() -> None:
    lists = {"ignored_layers": ["k_proj"]}
    found = resolve(checkpoint(modules_to_not_convert=["lm_head"], quantization_config=lists), "eetq")
    assert found.quantize is not None
    assert set(found.skipped) == {"lm_head", "k_proj"}


def test_scalars_of_older_files(tmp_path: Path) -> None:
    """TGI's own command wrote bits and groups into the weight file, and nothing into a config."""
    tensors = {
        "m.qweight": torch.zeros(8, 8, dtype=torch.int32),
        "m.scales": torch.zeros(1, 8),
        "gptq_bits": torch.tensor([3]),
        "gptq_groupsize": torch.tensor([-1]),
        "gptq_sym": torch.tensor([False]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert said_of_weights(examine(tmp_path)) == {
        "quant_method": "gptq", "bits": 3, "group_size": -1, "sym": False,
    }  # fmt: skip
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4}))
    assert said_of_weights(examine(tmp_path)) == {"quant_method": "gptq", "bits": 4}


def test_types_of_the_transformers_runner() -> None:
    """Whether it needs a state for each request, which is refused, transformers alone knows."""
    check_family({"model_type": "no such type"})
    for name, advice in (("no such type", "; --num-shard divides"), ("mllama", ", also --num-shard: the model is")):
        with pytest.raises(StartupError, match=rf"^--num-stage 2: {name} is .* into stages; leave it out{advice}"):
            check_family({"model_type": name}, 2)
    found = checkpoint(model_type="no such type", quantization_config={"quant_method": "gptq"})
    described = describe(found)
    assert (described.spec, described.scheme.method) == (None, "gptq")


def test_what_the_download_step_refuses_by_configs(tmp_path: Path) -> None:
    """Before weights are fetched; of a sharded model it knows the names of the tensors, too."""

    def refusal(flag: Quantize | None, **fields: Any) -> str | None:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        try:
            _refuse_quantized(tmp_path, DownloadConfig(model_id="org/m", quantize=flag))
        except StartupError as error:
            return str(error)
        return None

    llama = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 8,
        "num_attention_heads": 4, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert refusal(None, **llama) is None
    assert refusal("eetq", **llama) is None
    assert refusal(None, **llama, quantization_config={"quant_method": "gptq"}) is None
    assert refusal(None, model_type="x", quantization_config={"quant_method": "gptq"}) is None
    other = refusal(None, model_type="llama", quantization_config={"quant_method": "quanto"}) or ""
    assert other.startswith("org/m is quantized with quanto, which is not served; served are gptq, ")
    assert (refusal("gptq", model_type="llama") or "").startswith("`--quantize gptq` names a stored format")
    index = {"weight_map": {"m.qweight": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal("gptq", **llama) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ", though the checkpoint is made for 4 bits"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, ""),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": {"num_bits": 4}}}},
            ", though the checkpoint is made for 4 bits",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": None}}}, ""),
    ],
)
def test_the_log_says_what_becomes_of_activations(
    config: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    resolve(checkpoint(quantization_config=config)).report(torch.bfloat16)
    assert caplog.messages[0].endswith(f"activations in bfloat16{said}")
