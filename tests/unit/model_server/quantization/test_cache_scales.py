"""Who asks for a cache in float8, and the scales of keys and values that checkpoints hold."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.dict_reader import DictReader
from torch import Tensor

from model_server.quantization.kv_cache import CacheScales
from model_server.weights.header import read_headers
from model_server.weights.reader import SafetensorsReader

MODULE = "model.layers.0.self_attn"


def scales_of(**tensors: Any) -> tuple[float, float]:
    """Of one module with these tensors, by the part of their names after the module's."""
    return CacheScales(reader_of(tensors)).of(MODULE)


def reader_of(tensors: dict[str, Any]) -> DictReader:
    made: dict[str, Tensor] = {f"{MODULE}.{name}": torch.as_tensor(value) for name, value in tensors.items()}
    return DictReader({"model.norm.weight": torch.ones(1), **made})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({}, (1.0, 1.0)),
        ({"k_scale": 0.5, "v_scale": 2.0}, (0.5, 2.0)),
        ({"k_scale": 0.5}, (0.5, 1.0)),
        ({"kv_scale": 0.25}, (0.25, 0.25)),
        ({"attn.k_scale": 0.5, "attn.v_scale": 2.0}, (0.5, 2.0)),
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 2.0}, (0.5, 2.0)),
        ({"k_proj.output_scale": 0.5, "v_proj.output_scale": 2.0}, (0.5, 2.0)),
        ({"q_proj.output_scale": 7.0}, (1.0, 1.0)),
        ({"k_scale": 0.5, "kv_scale": 0.25}, (0.5, 0.25)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_names(names: dict[str, float], expected: tuple[float, float]) -> None:
    assert scales_of(**names) == expected


def test_of_several_numbers_the_largest(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scales = CacheScales(reader_of({"k_scale": [0.5, 3.0, 1.0], "v_scale": [[2.0], [0.5]]}))
    assert scales.of(MODULE) == (3.0, 2.0)
    scales.report()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "INFO",
            f"Scales of the KV cache that have several numbers: 2 (the first is {MODULE}.k_scale); the largest of each "
            "is used",
        ),
        ("INFO", "KV cache in float8_e4m3fn: 2 scales are from the checkpoint, the others are 1"),
    ]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, [1.0, math.nan], []])
def test_what_nothing_can_be_divided_by_counts_as_one(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    scales = CacheScales(reader_of({"k_scale": 0.5, "v_scale": value}))
    assert scales.of(MODULE) == (0.5, 1.0)
    caplog.set_level(logging.WARNING)
    scales.report()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"not positive and finite: 1 (the first is {MODULE}.v_scale)" in record.getMessage()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scalars_of_a_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """Without a dimension, under names with or without the base prefix."""
    tensors = {f"{MODULE}.k_scale": 0.5, f"{MODULE}.v_scale".removeprefix("model."): 2.0}
    file = tmp_path / "model.safetensors"
    save_file({name: torch.tensor(value, dtype=dtype) for name, value in tensors.items()}, file)
    with SafetensorsReader(read_headers([file]), dtype=torch.float16, device=torch.device("cpu")) as reader:
        assert CacheScales(reader).of(MODULE) == (0.5, 2.0)
