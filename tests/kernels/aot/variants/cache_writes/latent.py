"""What the kernels of `model_server.kernels.cache_writes.latent` are compiled for."""

from __future__ import annotations

from typing import Any

from aot.variant import Variant
from model_server.kernels.cache_writes.latent import _sizes, latent_write_heads


def variants() -> list[Variant]:
    """Compile DeepSeek V2 and V3, whole and divided, for each cache."""
    return [
        _variant("16 heads", 16),
        _variant("16 heads", 16, dtype="fp16"),
        _variant("16 heads", 16, dtype="fp32"),
        _variant("128 heads", 128),
        _variant("16 heads, e4m3 cache", 16, cache="fp8e4nv"),
        _variant("16 heads, e5m2 cache", 16, cache="fp8e5"),
    ]


def _variant(name: str, heads: int, *, dtype: str = "bf16", cache: str | None = None) -> Variant:
    number = f"*{dtype}"
    signature: dict[str, Any] = {
        "latent": number, "weight": "*fp32", "rotated": number, "turned": number, "table": "*fp32",
        "positions": "*i64", "rows": f"*{cache or dtype}", "slots": "*i64", "out": number, "latent_stride": "i32",
        "rotated_stride": "i32", "rotated_head_stride": "i32", "turned_stride": "i32", "turned_head_stride": "i32",
        "row_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    largest = {None: None, "fp8e4nv": 448.0, "fp8e5": 57344.0}[cache]
    return Variant(
        name=f"latent of {name}, {dtype}",
        kernel=latent_write_heads,
        signature=signature,
        constants={"NUM_HEADS": heads, "RANK": 512, "DIM": 64, "LARGEST": largest, **_sizes(512, 64)},
        divisible=tuple(word for word in signature if word != "eps"),
        excluded=frozenset({80}) if cache is not None else frozenset(),
    )
