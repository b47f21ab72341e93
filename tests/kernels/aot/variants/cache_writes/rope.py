"""What the kernels of `model_server.kernels.cache_writes.rope` are compiled for."""

from __future__ import annotations

from aot.variant import Variant
from model_server.kernels.cache_writes.rope import _tile, rotate_write_heads


def variants() -> list[Variant]:
    """Compile heads, rotations, norms and caches of real models."""
    return [
        _variant("32/8 heads of 64", 32, 8, 64, 64),
        _variant("32/8 heads of 128", 32, 8, 128, 128),
        _variant("32/8 heads of 128", 32, 8, 128, 128, dtype="fp16"),
        _variant("32/8 heads of 128", 32, 8, 128, 128, dtype="fp32"),
        _variant("32/4 heads of 128, norms", 32, 4, 128, 128, norm="shared"),
        _variant("8/4 heads of 256, norms", 8, 4, 256, 256, norm="shared"),
        _variant("32/32 heads of 80, 32 rotate, a norm each", 32, 32, 80, 32, norm="each"),
        _variant("32/32 heads of 96", 32, 32, 96, 96),
        _variant("71/1 heads of 64, no rotation", 71, 1, 64, 0),
        _variant("32/8 heads of 128, e4m3 cache", 32, 8, 128, 128, cache="fp8e4nv"),
        _variant("32/8 heads of 128, e5m2 cache", 32, 8, 128, 128, cache="fp8e5"),
    ]


def _variant(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    rotary: int,
    *,
    dtype: str = "bf16",
    cache: str | None = None,
    norm: str | None = None,
) -> Variant:
    block, heads = _tile(dim)
    signature = {
        "qkv": f"*{dtype}", "rows": f"*{cache or dtype}", "slots": "*i64", "qkv_stride": "i32", "row_stride": "i32",
        "eps": "fp32", "key_scale": "fp32", "value_scale": "fp32",
    }  # fmt: skip
    largest = {None: None, "fp8e4nv": 448.0, "fp8e5": 57344.0}[cache]
    constants: dict[str, object] = {
        "FIRST": 0 if rotary or norm else num_heads, "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "DIM": dim,
        "ROTARY": rotary, "BLOCK": block, "HEADS": heads, "PER_HEAD": norm == "each", "LARGEST": largest,
    }  # fmt: skip
    optional = {"table": rotary > 0 and "*fp32", "positions": rotary > 0 and "*i64", "weight": norm and "*fp32"}
    signature |= {argument: word for argument, word in optional.items() if word}
    constants |= {argument: None for argument, word in optional.items() if not word}
    pointers = tuple(argument for argument, word in signature.items() if word.startswith("*"))
    return Variant(
        name=f"{name}, {dtype}",
        kernel=rotate_write_heads,
        signature=signature,
        constants=constants,
        divisible=(*pointers, "qkv_stride", "row_stride"),
        excluded=frozenset({80}) if cache is not None else frozenset(),
    )
