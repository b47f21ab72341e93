"""Which products the GPU benchmarks time and check."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.products import products_of
from model_server.layers.linear.decode_gemm import BUCKETS, DecodeGemm, DecodeGemmLinear
from model_server.layers.linear.linear import TorchLinear, torch_product


def test_products_are_those_of_the_bucket_of_rows() -> None:
    own = [partial(torch_product) for _ in BUCKETS]
    weight = torch.ones(4, 2)
    linear = DecodeGemmLinear(weight, None, DecodeGemm((4, 2), torch.float32, [[product] for product in own]))
    for number, most in enumerate(BUCKETS):
        assert products_of(linear, most) == (torch_product, own[number])
    assert products_of(linear, 2) == (torch_product, own[1])
    assert products_of(linear, BUCKETS[-1] + 1) == products_of(TorchLinear(weight, None), 1) == (torch_product,)
