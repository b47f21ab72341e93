"""Where a checkpoint says how it is quantized, the best source first; and the modules that are to stay plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wire.quantization.config import by_tensors, is_skipped, said_of, skipped, wants_float8_cache
from wire.quantization.methods import method_of

GPTQ, AWQ = {"quant_method": "gptq"}, {"quant_method": "awq"}
# From the best source to the worst: the file, what it holds, and the method that this stands for.
SOURCES: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"quantization_config": {"quant_method": "one"}}, "one"),
    ("config.json", {"compression_config": {"quant_method": "two"}}, "two"),
    ("config.json", {"text_config": {"quantization_config": {"quant_method": "three"}}}, "three"),
    ("config.json", {"text_config": {"compression_config": {"quant_method": "four"}}}, "four"),
    ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt FP8"),
    ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}, "gptq"),
    ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
]


def said(folder: Path, *sources: tuple[str, dict[str, Any], str]) -> str | None:
    files: dict[str, dict[str, Any]] = {"config.json": {}}
    for name, fields, _ in sources:
        known = files.setdefault(name, {})
        inner = {**known.get("text_config", {}), **fields.get("text_config", {})}
        known.update(fields | ({"text_config": inner} if inner else {}))
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields))
    found = said_of(folder, files["config.json"], ValueError)
    return None if found is None else method_of(found)


@pytest.mark.parametrize("first", range(len(SOURCES)))
def test_the_best_source_wins(first: int, tmp_path: Path) -> None:
    assert said(tmp_path, *SOURCES[first:]) == SOURCES[first][2]


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_a_layout_that_only_the_older_file_names(key: str, tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, key: "gptq_v2"}))
    fields = {"quantization_config": {**GPTQ, "bits": 4}}
    found = said_of(tmp_path, fields, ValueError)
    assert found == {**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}
    assert said_of(tmp_path, {"quantization_config": {**GPTQ, "format": "gptq"}}, ValueError) == {
        **GPTQ,
        "format": "gptq",
    }


def test_none_says_so(tmp_path: Path) -> None:
    assert said(tmp_path) is None
    assert said(tmp_path, ("config.json", {"quantization_config": None, "compression_config": {}}, "")) is None


def test_a_list_of_plain_modules_says_nothing_of_what_is_stored(tmp_path: Path) -> None:
    lists = {"quantization_config": {"modules_to_not_convert": ["lm_head"]}}
    assert said(tmp_path, ("config.json", lists, "")) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bits": 4, "version": "GEMM"}, "awq"),
        ({"bits": 4, "desc_act": True}, "gptq"),
        ({"bits": 4, "quant_method": "awq"}, "awq"),
        ({"w_bit": 8, "version": "GEMM"}, "awq of 8 bits"),
        ({"dataset": "c4"}, None),
    ],
)
def test_older_files(config: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    assert said(tmp_path, ("quantize_config.json", config, "")) == expected


def test_names_of_older_files(tmp_path: Path) -> None:
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 64}))
    found = said_of(tmp_path, {}, ValueError)
    assert found is not None
    assert (found["bits"], found["group_size"]) == (4, 64)


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"quantize_config\.json is not valid JSON"):
        said_of(tmp_path, {}, ValueError)


def test_what_tensors_say() -> None:
    assert by_tensors({"m.weight": (4, 4)}) is None
    assert by_tensors({"m.scales": (2, 64), "m.qweight": (8, 64)}) == GPTQ
    assert by_tensors({"m.qweight": (64, 8), "m.scales": (2, 64)}) == AWQ
    assert by_tensors({"m.qweight": (8, 64)}) == GPTQ


def test_which_modules_stay_plain() -> None:
    fields = {
        "modules_to_not_convert": ["lm_head", 3, ""],
        "text_config": {"ignored_layers": ["model.layers.0"]},
        "quantization_config": {"llm_int8_skip_modules": ["mlp.gate"]},
    }
    names = skipped(fields)
    assert set(names) == {"lm_head", "model.layers.0", "mlp.gate"}
    assert is_skipped("lm_head", names)
    assert is_skipped("model.layers.0.self_attn.q_proj", names)
    assert is_skipped("language_model.model.layers.1.mlp.gate", names)


def test_only_whole_parts_of_a_name_count() -> None:
    assert not is_skipped("model.layers.1.mlp.gate_proj", ("gate", "mlp.gate"))
    assert not is_skipped("model.layers.10.mlp.up_proj", ("model.layers.1",))
    assert not is_skipped("model.layers.1.mlp.up_proj", ())


FLOAT_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("fields", "beside", "wanted"),
    [
        ({}, None, False),
        ({"quantization_config": {"kv_cache_scheme": None}}, None, False),
        ({"quantization_config": {"kv_cache_scheme": FLOAT_SCHEME}}, None, True),
        ({"compression_config": {"kv_cache_scheme": FLOAT_SCHEME}}, None, True),
        ({"text_config": {"quantization_config": {"kv_cache_scheme": FLOAT_SCHEME}}}, None, True),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}, None, False),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}}, None, False),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, None, True),
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, True),
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, False),
        ({"quantization_config": 3}, {"quantization": []}, False),
    ],
)
def test_who_wants_float8(fields: dict[str, Any], beside: Any, wanted: bool, tmp_path: Path) -> None:
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert wants_float8_cache(tmp_path, fields, ValueError) is wanted
