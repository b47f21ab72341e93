"""Quantized weights: an engine on the stand-in card says about what one on the CPU says of the same weights.

The products of a card round what they multiply to 16 bits, in float32 too, so logprobs differ by some hundredths; wrong
scales or layouts are far outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import CARD, CPU, answers_of, make_engine, small_sizes, worst_logprob_difference
from support.quantized_folder import quantize_folder
from support.quantized_ways import WAYS
from support.tiny_models import tiny_checkpoint

MOST = 0.15
WHEN_LOADED = ["fp8", "eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4"]
STORED = [
    "fp8 blocks", "fbgemm", "modelopt", "int4", "int3", "int8", "nvfp4", "mxfp4", "mxfp8", "modelopt nvfp4", "nf4",
    "torchao int8", "torchao int4", "mixed",
]  # fmt: skip
EXPERTS = ["fp8", "bitsandbytes-nf4"]


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_sizes(), torch.inference_mode():
        yield


def _check(folder: Path, quantize: str | None = None) -> None:
    expected = answers_of(make_engine(folder, CPU, torch.bfloat16, quantize=quantize)[0])
    actual = answers_of(make_engine(folder, CARD, torch.bfloat16, quantize=quantize)[0])
    assert worst_logprob_difference(expected, actual) <= MOST


@pytest.mark.parametrize("way", WHEN_LOADED)
def test_weights_that_are_quantized_when_loaded(way: str, tmp_path: Path) -> None:
    _check(tiny_checkpoint("llama", tmp_path / "plain"), way)


@pytest.mark.parametrize("way", STORED)
def test_weights_that_are_stored_quantized(way: str, tmp_path: Path) -> None:
    plain = tiny_checkpoint("llama", tmp_path / "plain")
    _check(quantize_folder(plain, tmp_path, *WAYS[way]())[0])


@pytest.mark.parametrize("way", EXPERTS)
def test_experts_that_are_quantized_when_loaded(way: str, tmp_path: Path) -> None:
    _check(tiny_checkpoint("mixtral", tmp_path / "plain"), way)
