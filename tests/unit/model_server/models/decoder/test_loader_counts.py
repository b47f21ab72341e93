"""What the loader counts as the memory of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.dict_reader import DictReader
from support.loading import load
from support.quantized import gptq_tensors, rounded
from support.tiny_models import tiny_checkpoint

from model_server.cpp import library as cpp
from model_server.distributed.group import ProcessGroup
from model_server.layers.linear.code_panels import CodeLinear
from model_server.models.decoder.loader import Loader
from model_server.quantization.formats import formats_of
from model_server.quantization.scheme import Scheme
from model_server.weights.matrix import Part

CPU = torch.device("cpu")


def test_a_matrix_that_is_decoded_counts_as_it_is_kept() -> None:
    """Routers and `kv_b_proj` are kept as floating point numbers, whatever they are stored in."""
    numbers = rounded(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), 4, 32)
    tensors = {f"m.{name}": tensor for name, tensor in gptq_tensors(numbers).items()}
    scheme = Scheme("gptq", formats_of({"sym": False}))
    loader = Loader(DictReader(tensors), CPU, ProcessGroup(), scheme=scheme)
    matrix = loader.dense("m", 32, 64)
    assert torch.equal(matrix, numbers.exact())
    assert loader.weight_bytes == matrix.nbytes == 4 * 32 * 64


@pytest.mark.skipif(not cpp.usable(CPU, torch.float32), reason="needs the C++ operators")
def test_a_matrix_of_codes_counts_as_it_is_packed() -> None:
    """Zero points that are all the same take no place in panels."""
    numbers = rounded(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), 4, 32, symmetric=True)
    tensors = {f"m.{name}": tensor for name, tensor in gptq_tensors(numbers).items()}
    loader = Loader(DictReader(tensors), CPU, ProcessGroup(), scheme=Scheme("gptq", formats_of({})))
    linear = loader.column_linear([Part("m", ((0, 64),), 64)], 64)
    assert isinstance(linear, CodeLinear)
    assert loader.held_bytes == linear.panels.nbytes < loader.weight_bytes


@pytest.mark.skipif(not cpp.usable(CPU, torch.float32), reason="needs the C++ operators")
def test_the_packed_copy_of_a_tied_head_counts(tmp_path: Path) -> None:
    """The embedding's rows stay as they are, so the head takes as much memory as one of its own."""
    taken = [
        load(tiny_checkpoint("llama", tmp_path / str(tied), with_tokenizer=False, tie_word_embeddings=tied))
        .traits.weight_bytes
        for tied in (True, False)
    ]  # fmt: skip
    assert taken[0] == taken[1]
