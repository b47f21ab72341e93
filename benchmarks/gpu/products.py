"""The products that a linear layer may choose from."""

from __future__ import annotations

from collections.abc import Sequence

from model_server.layers.linear.decode_gemm import BUCKETS, DecodeGemm, DecodeGemmLinear, Product
from model_server.layers.linear.linear import Linear, torch_product


def products_of(linear: Linear, rows: int) -> Sequence[Product]:
    """Return what multiplies so many rows: the library's product, then our own where the layer measures them."""
    if not (isinstance(linear, DecodeGemmLinear) and isinstance(linear.gemm, DecodeGemm)) or rows > BUCKETS[-1]:
        return (torch_product,)
    bucket = next(number for number, most in enumerate(BUCKETS) if rows <= most)
    return linear.gemm.candidates[bucket]
