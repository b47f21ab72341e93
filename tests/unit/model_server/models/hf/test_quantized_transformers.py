"""Quantized models of types that transformers computes: what plain models of the decoded weights compute."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support import quantized
from support.loading import load
from support.quantized_folder import quantize_folder
from support.quantized_ways import WAYS
from support.tiny_types import type_checkpoint
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.models.hf.experts import _LAYOUT, QuantizedExperts
from model_server.models.hf.paged import TransformersRunner
from model_server.models.hf.quantized import QuantizedLinear
from model_server.quantization.forms.codes import Codes
from model_server.quantization.onload import QUANTIZERS

SEQUENCES = prompts(256)
TYPE = "arcee"
EIGHT_BITS = ("int8", "bitsandbytes int8")
EXPERTS: dict[str, dict[str, Any]] = {
    "dots1": {"moe_intermediate_size": 64},
    "exaone_moe": {"moe_intermediate_size": 64},
}
ALWAYS = ("gptq", "nf4", "int4")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transformers") / "source"
    type_checkpoint(TYPE, path)
    return path


def check(stored: Path, decoded: Path, quantize: str | None = None) -> TransformersRunner:
    runner = load(stored, quantize=quantize)
    assert isinstance(runner, TransformersRunner)
    num_quantized = sum(isinstance(module, QuantizedLinear) for module in runner.model.modules())
    assert num_quantized > 0
    plain = load(decoded)
    assert_equal_logits(run_protocol(runner, SEQUENCES, 4), run_protocol(plain, SEQUENCES, 4))
    return runner


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if way in ALWAYS else pytest.mark.parity)
        for way in ("gptq", "awq", "fp8 blocks", "int4", "nvfp4", "nf4", "bitsandbytes int8", "torchao fp8")
    ],
)
def test_stored_quantized(way: str, source: Path, tmp_path: Path) -> None:
    if way in ("gptq", "awq"):
        stored = quantized.quantize_folder(source, tmp_path, way, group=16, act_order=way == "gptq")
        decoded = tmp_path / "plain"
    else:
        stored, decoded = quantize_folder(source, tmp_path, *WAYS[way]())
    check(stored, decoded)


@pytest.mark.parametrize(
    "method",
    ["bitsandbytes-nf4", *(pytest.param(m, marks=pytest.mark.parity) for m in ("eetq", "bitsandbytes", "fp8"))],
)
def test_quantized_on_load(method: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def store(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        form = QUANTIZERS[method](weight, (0, weight.shape[1]), module)
        return {}, form.dequantize(torch.float32)

    _, decoded = quantize_folder(source, tmp_path, store, {})
    (decoded / "config.json").write_text((source / "config.json").read_text())
    check(source, decoded, method)
    line = next(message for message in caplog.messages if message.startswith("Weights: "))
    assert line.startswith(f"Weights: {method} on load, ") and line.endswith("; activations in float32")


def test_matrices_are_quantized_before_the_next_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [n for n in load_file(source / "model.safetensors") if n.endswith("_proj.weight")]
    shapes = {tensor.shape for n, tensor in load_file(source / "model.safetensors").items() if n in names}
    quantize, living = QUANTIZERS["eetq"], []

    def plain() -> set[int]:
        gc.collect()
        held = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.shape in shapes]
        return {one.untyped_storage().data_ptr() for one in held if one.is_floating_point() and not one.is_meta}

    def counted(weight: torch.Tensor, columns: tuple[int, int], name: str) -> Codes:
        living.append(len(plain()))
        return quantize(weight, columns, name)

    monkeypatch.setitem(QUANTIZERS, "eetq", counted)
    gc.freeze()  # what other tests have made is not looked at
    try:
        load(source, quantize="eetq")
    finally:
        gc.unfreeze()
    assert len(living) == len(names) > 20
    assert max(living) == 1


def test_a_matrix_of_another_size(source: Path, tmp_path: Path) -> None:
    stored, _ = quantize_folder(source, tmp_path, lambda module, weight: None, {})
    (stored / "config.json").write_text((source / "config.json").read_text())
    name = next(n for n in load_file(stored / "model.safetensors") if n.endswith("down_proj.weight"))

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:5].clone()

    wanted = list(load_file(source / "model.safetensors")[name].shape)
    sentence = f"weight {name} has shape [5, {wanted[1]}]; the config asks for {wanted}"
    assert refusal(changed(stored, cut), quantize="eetq") == sentence
    assert refusal(stored) == sentence


def test_what_a_matrix_is_refused_for_is_not_lost(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers catches what is raised while it converts a tensor."""

    def refuse(weight: torch.Tensor, columns: tuple[int, int], name: str) -> Codes:
        raise StartupError(f"weight {name} is not to be had")

    monkeypatch.setitem(QUANTIZERS, "eetq", refuse)
    assert refusal(source, quantize="eetq") == "weight model.layers.0.mlp.down_proj is not to be had"


def test_matrices_that_the_config_spares(source: Path, tmp_path: Path) -> None:
    stored, _ = quantize_folder(source, tmp_path, lambda module, weight: None, {"quant_method": "gptq"})
    config = json.loads((source / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"modules_to_not_convert": ["mlp", "self_attn"]}))
    spared = load(stored, quantize="eetq")
    assert isinstance(spared, TransformersRunner)
    assert not any(isinstance(module, QuantizedLinear) for module in spared.model.modules())


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(folder: Path, quantize: str | None = None, group: ProcessGroup | None = None) -> str:
    with pytest.raises(StartupError) as refused:
        load(folder, quantize=quantize, group=group)
    return str(refused.value)


def test_damaged_matrices(source: Path, tmp_path: Path) -> None:
    stored, _ = quantize_folder(source, tmp_path, *WAYS["bitsandbytes int8"]())
    name = next(n for n in load_file(stored / "model.safetensors") if n.endswith("down_proj.SCB"))

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:5].clone()

    assert f"weight {name} has shape [5]" in refusal(changed(stored, cut))


@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        ("dots1", "fp8 blocks"),
        pytest.param("ernie4_5_moe", "bitsandbytes int8", marks=pytest.mark.parity),
        pytest.param("exaone_moe", "int4", marks=pytest.mark.parity),
    ],
)
def test_experts_that_transformers_has_in_one_tensor(model_type: str, way: str, tmp_path: Path) -> None:
    """Each under the names of published files, with its own scales."""
    type_checkpoint(model_type, tmp_path / "plain", **EXPERTS.get(model_type, {}))
    stored, decoded = quantize_folder(tmp_path / "plain", tmp_path, *WAYS[way]())
    runner = check(stored, decoded)
    assert sum(isinstance(module, QuantizedExperts) for module in runner.model.modules()) > 1


@pytest.mark.skipif("exaone" not in CONFIG_MAPPING_NAMES, reason="this transformers does not know exaone")
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way == "fp8 blocks" else pytest.mark.parity) for way in ("fp8 blocks", *EIGHT_BITS)],
)
def test_layers_that_transformers_renames(way: str, tmp_path: Path) -> None:
    """EXAONE 3 as it is published: `transformer.h.0.attn.attention.q_proj`."""
    type_checkpoint("exaone", tmp_path / "plain")
    assert "transformer.h.0.mlp.c_fc_0.weight" in load_file(tmp_path / "plain" / "model.safetensors")
    check(*quantize_folder(tmp_path / "plain", tmp_path, *WAYS[way]()))


def test_experts_of_an_unknown_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_LAYOUT, "has_bias", True)
    type_checkpoint("dots1", tmp_path / "plain", **EXPERTS["dots1"])
    stored, _ = quantize_folder(tmp_path / "plain", tmp_path, *WAYS["fp8 blocks"]())
    assert refusal(stored) == (
        "the quantized experts of model.layers.0.mlp.experts have a layout that is not served: give plain weights"
    )


def test_a_scale_beside_a_plain_weight(source: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.ones(2, 3)

    for folder in (source, quantize_folder(source, tmp_path / "q", *WAYS["nf4"]())[0]):
        shutil.copytree(folder, tmp_path / folder.name)
        assert f"weight {name} is in the files, but nothing of {TYPE}" in refusal(changed(tmp_path / folder.name, add))


def test_several_shards(source: Path, tmp_path: Path) -> None:
    stored, _ = quantize_folder(source, tmp_path, *WAYS["nf4"]())

    class Two(ProcessGroup):
        size = 2

    assert refusal(stored, group=Two()) == (
        f"{TYPE} is computed by transformers, and served as bitsandbytes on one shard only: use --num-shard 1"
    )


def test_models_that_keep_a_state_are_refused(tmp_path: Path) -> None:
    type_checkpoint("rwkv", tmp_path / "plain")
    refused = refusal(tmp_path / "plain", quantize="eetq")
    assert refused.startswith(
        "`--quantize eetq`: rwkv is served by the stateful runner, which serves plain weights only"
    )
    stored, _ = quantize_folder(tmp_path / "plain", tmp_path, *WAYS["bitsandbytes int8"]())
    assert refusal(stored).startswith(
        "rwkv is stored as bitsandbytes; the stateful runner serves plain weights only (its layers are recurrent"
    )


def test_adapters_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refused:
        load(source, quantize="eetq", adapters={"a": tmp_path})
    assert str(refused.value) == (
        f"{TYPE} is computed by transformers, which takes LoRA adapters with plain weights only, not with eetq: leave "
        "out --lora-adapters, or merge the adapter into the plain model"
    )
