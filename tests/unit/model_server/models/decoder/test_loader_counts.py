"""What the loader counts as the memory of weights."""

from __future__ import annotations

import torch
from support.dict_reader import DictReader
from support.quantized import gptq_tensors, rounded

from model_server.distributed.group import ProcessGroup
from model_server.models.decoder.loader import Loader
from model_server.quantization.formats import formats_of
from model_server.quantization.scheme import Scheme

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
